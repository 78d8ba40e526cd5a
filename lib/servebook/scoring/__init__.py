"""Predictions against measurements, and the verdict on a measured point, as numbers. Knows no files and no charts."""
