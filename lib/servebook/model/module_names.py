"""Matches module names against the target and ignore lists of a quantized checkpoint.

The lists use the checkpoint's names. They may differ from the code's names before the layer number, in the words for
a layer's parts (`block_sparse_moe` for `mlp`), and where the code fuses several matrices.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache

# {name in a checkpoint: transformers' name}
WORDS = {
    "block_sparse_moe": "mlp", "feed_forward": "mlp", "ffn": "mlp", "attn": "self_attn", "attention": "self_attn",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "wqkv": "qkv_proj", "wo": "o_proj",
}  # fmt: skip
WORD = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(WORDS)})(?![A-Za-z0-9_])")
# {fused matrix in the code: its first part in a checkpoint}
FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "gate_proj", "fused_qkv_a_proj": "q_a_proj"}


@lru_cache(maxsize=262144)
def plain(name: str) -> str:
    """A module's name or a list entry, with transformers' names for the parts of a layer."""
    return WORD.sub(lambda found: WORDS[found.group()], name)


def forms(name: str) -> tuple[str, ...]:
    """The names under which a list may refer to a module: its own, that from `layers.<number>` on, and for a fused
    matrix also that of its first part."""
    own = plain(name)
    parent, _, last = own.rpartition(".")
    names = [own] if last not in FUSED else [own, f"{parent}.{FUSED[last]}".lstrip(".")]
    return tuple(dict.fromkeys(f for n in names for f in (n, tail_of(n))))


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
        given = [plain(e) for e in entries or () if isinstance(e, str)]
        self.patterns = [e for e in given if e.startswith("re:") or "*" in e or "?" in e or "." not in e]
        self.exact = {e for e in given if e not in set(self.patterns)}
        self.exact |= {tail_of(e) for e in self.exact}

    def __contains__(self, name: object) -> bool:
        return self.has(str(name))

    def has(self, name: str) -> bool:
        named = forms(name)
        for form in named:
            parts = form.split(".")
            if any(".".join(parts[:i]) in self.exact for i in range(1, len(parts) + 1)):
                return True
        return any(matches(p, form) for p in self.patterns for form in named)
