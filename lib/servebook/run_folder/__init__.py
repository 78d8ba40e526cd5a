"""The folder of a run: what is in it, under which names, and how it is written and read.

File names and globs of a run are known here and nowhere else. Knows no charts and no page.
"""
