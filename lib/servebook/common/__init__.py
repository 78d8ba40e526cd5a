"""What every package shares: the error a user sees, files written whole, statistics. Knows nothing of serving."""
