"""Hardware: datasheet figures of GPUs with their sources, and this machine's processor. Knows no model."""
