"""The post: executed notebooks and a run's stored results as one self-contained HTML page, and its short form."""
