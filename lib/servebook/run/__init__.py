"""A run from start to end: the book, which connects the stages with the run's folder, and the pipeline."""
