"""What a run asks for: parameters read from strict YAML, its sweeps, and the points they consist of.

Knows no model, no hardware and no server: it holds what the user wrote, checked.
"""
