"""Shared by all packages: records that packages exchange, the user-facing error, atomic file writing, statistics.

Knows no engine, no model and no run folder.
"""
