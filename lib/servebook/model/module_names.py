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


TAIL = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d.*)$")


def tail_of(name: str) -> str:
    """The name from `layers.<number>` on, since checkpoints and transformers use different prefixes."""
    found = TAIL.search(name)
    return found.group(1) if found else name


class Names:
    """A list of entries, each an re: expression, a name with wildcards, a module's or its parent's name, or one word of
    a name. Names and words are looked up in sets, all wildcards are one expression, the rest is tried one by one."""

    def __init__(self, entries: Iterable[str] | None) -> None:
        entries = [entries] if isinstance(entries, str) else entries or ()
        given = [plain(e) for e in entries if isinstance(e, str)]
        self.expressions = [re.compile(e[3:]) for e in given if e.startswith("re:")]
        rest = [e for e in given if not e.startswith("re:")]
        wild = [e for e in rest if "*" in e or "?" in e]
        tries = dict.fromkeys(t for e in wild for f in (e, tail_of(e)) for t in (f, f + ".*"))
        self.wild = re.compile("|".join(map(fnmatch.translate, tries))) if tries else None
        named = set(rest) - set(wild)
        self.words = {e for e in named if "." not in e}
        self.exact = {f for e in named - self.words for f in (e, tail_of(e))}

    def __contains__(self, name: object) -> bool:
        return self.has(str(name))

    def has(self, name: str) -> bool:
        named = forms(name)
        for form in named:
            parts = form.split(".")
            if self.words and not self.words.isdisjoint(parts):
                return True
            if self.exact and any(".".join(parts[:i]) in self.exact for i in range(1, len(parts) + 1)):
                return True
            if self.wild and self.wild.match(form):
                return True
            if any(e.match(form) or e.match("model." + form) for e in self.expressions):
                return True
        return False
