"""The command `servebook`: parses, calls one package, prints. A fault the user can fix is one line."""

from .command import main

__all__ = ["main"]
