"""Scores of predictions against measurements, and verdicts on measured points, as numbers. Knows no files and no
charts."""
