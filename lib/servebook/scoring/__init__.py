"""Scores of predictions and verdicts on measured points, as numbers. Knows no files and no charts."""
