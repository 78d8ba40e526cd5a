"""The user's input: parameters read from strict YAML, the run's sweeps, and the points of each sweep.

Knows no model, no hardware and no server.
"""
