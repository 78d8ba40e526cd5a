"""A run from start to end: the book, which binds the stages to a run's folder, and the pipeline that walks it."""
