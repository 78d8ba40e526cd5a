"""Predictions of every point with its interval, from parameters, model and hardware.

Holds the closed forms, the simulated scheduler, step times and calibration. Starts no server and reads no run folder.
"""
