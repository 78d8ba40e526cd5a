"""Predictions: from parameters, model and hardware to every point with its interval.

Holds the closed forms, the simulated scheduler, step times and calibration. Knows no server and no run folder.
"""
