"""YAML text into plain values; dangerous YAML features are rejected with their line, in bounded time."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ..common.errors import ServebookError

LONGEST_TEXT = 1 << 18  # characters: PyYAML reads about a hundred thousand a second
MOST_VALUES = 50_000  # with all aliases expanded
DEEPEST = 100
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_SIXTIES = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_LONGEST_NUMBER = 40
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def parse(text: str, where: str, example: str) -> tuple[yaml.Node | None, Any]:
    """The text's nodes, which know their lines, and its value. Raises ServebookError for invalid YAML, and for YAML
    that is easily misread: duplicate keys, octal and sexagesimal numbers, endless values."""
    if len(text) > LONGEST_TEXT:
        raise ServebookError(f"is {len(text):,} characters long", where, f"At most {LONGEST_TEXT:,}")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return None, None
        _Checked(where).check(root)
        return root, yaml.SafeLoader("").construct_document(root)  # parsed once: it is slow
    except RecursionError:
        raise ServebookError("is nested too deeply", where, f"At most {DEEPEST} levels") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2026-02-31
        mark = getattr(error, "problem_mark", None)
        at = f"{where}, line {mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ServebookError(
            f"not valid YAML ({problem})", at, f"Correct the line, or compare it with {example}"
        ) from error


class _Checked:
    """Walks every node once, however often aliases repeat it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._sizes: dict[int, int] = {}  # number of values of a node, with aliases expanded
        self._open: set[int] = set()

    def check(self, node: yaml.Node) -> int:
        """The number of values of the node."""
        if id(node) in self._open:
            raise self._fault(node, "an alias inside of what it names", "Write the value out")
        if (known := self._sizes.get(id(node))) is not None:
            return known
        self._open.add(id(node))
        if len(self._open) > DEEPEST:
            raise self._fault(node, "nested too deeply", f"At most {DEEPEST} levels")
        size = 1
        if isinstance(node, yaml.MappingNode):
            size += self._mapping(node)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(self.check(value) for value in node.value)
        elif isinstance(node, yaml.ScalarNode):
            self._scalar(node)
        if size > MOST_VALUES:
            raise self._fault(node, f"expands to more than {MOST_VALUES:,} values", "Give fewer, or fewer aliases")
        self._open.discard(id(node))
        self._sizes[id(node)] = size
        return size

    def _mapping(self, node: yaml.MappingNode) -> int:
        # PyYAML silently uses the second of two equal keys, and half of the sweeps would be lost. Keys from a merge
        # (<<)
        # may be overridden by the keys beside it: that is YAML.
        seen: set[str] = set()
        size = 0
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._fault(key, "a key that is a list or a mapping", "Write a plain key")
            if key.value in seen:
                raise self._fault(key, f"key {key.value!r} is given twice", "Keep one of them")
            seen.add(key.value)
            size += self.check(value)
        return size

    def _scalar(self, node: yaml.ScalarNode) -> None:
        if node.tag not in _NUMBERS:
            return
        text = node.value
        if len(text) > _LONGEST_NUMBER:
            raise self._fault(node, f"a number of {len(text):,} digits", "Write a smaller one")
        if _OCTAL.fullmatch(text):
            decimal = text.lstrip("+-0_") or "0"
            raise self._fault(node, f"{text} is read as octal", f"Write {decimal}, or quote it where it is text")
        if _SIXTIES.fullmatch(text):
            raise self._fault(node, f"{text} is read as sixties, as in hours and minutes", "Quote it if it is text")

    def _fault(self, node: yaml.Node, what: str, fix: str) -> ServebookError:
        return ServebookError(what, f"{self._where}, line {node.start_mark.line + 1}", fix)
