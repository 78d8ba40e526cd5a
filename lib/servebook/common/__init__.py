"""What every package shares: the records that packages exchange, the error a user sees, whole files, statistics.

Knows no engine, no model and no run folder.
"""
