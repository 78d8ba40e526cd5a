"""The folder of a run: its files, their names, reading and writing.

File names and globs of a run are defined only here. Knows no charts and no page.
"""
