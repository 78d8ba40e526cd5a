"""Matches module names against the target and ignore lists of a quantized checkpoint.

The lists use the checkpoint's names, whose prefix before the layer number may differ from transformers' names.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache


def tail_of(name: str) -> str:
    """The name from `layers.<number>` on, since checkpoints and transformers use different prefixes."""
    found = re.search(r"(?:^|\.)((?:layers|h|blocks)\.\d.*)$", name)
    return found.group(1) if found else name


@lru_cache(maxsize=65536)
def matches(pattern: str, name: str) -> bool:
    """Whether a list entry matches a module: an re: expression, wildcards, a full or parent's name, or one word."""
    if pattern.startswith("re:"):
        expression = pattern[3:]
        return bool(re.match(expression, name) or re.match(expression, "model." + name))
    tail, own = tail_of(pattern), tail_of(name)
    if "*" in pattern or "?" in pattern:
        tries = {pattern, pattern + ".*", tail, tail + ".*"}
        return any(fnmatch.fnmatchcase(n, t) for n in {name, own} for t in tries)
    if "." not in pattern:
        return pattern in name.split(".") or name == pattern
    if name == pattern or name.startswith(pattern + "."):
        return True
    return tail != pattern and (own == tail or own.startswith(tail + "."))


class Names:
    """A list of entries. Exact names are looked up in a set; only patterns are tried one by one."""

    def __init__(self, entries: Iterable[str] | None) -> None:
        given = [e for e in entries or () if isinstance(e, str)]
        self.patterns = [e for e in given if e.startswith("re:") or "*" in e or "?" in e or "." not in e]
        self.exact = {e for e in given if e not in set(self.patterns)}
        self.exact |= {tail_of(e) for e in self.exact}

    def __contains__(self, name: object) -> bool:
        return self.has(str(name))

    def has(self, name: str) -> bool:
        for form in (name, tail_of(name)):
            parts = form.split(".")
            if any(".".join(parts[:i]) in self.exact for i in range(1, len(parts) + 1)):
                return True
        return any(matches(p, name) for p in self.patterns)
