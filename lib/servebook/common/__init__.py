"""What every package shares: the records that packages exchange, the error a user sees, files written whole, statistics.

Knows no engine, no model and no run folder.
"""
