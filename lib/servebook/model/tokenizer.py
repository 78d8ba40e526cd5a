"""A synthetic tokenizer and a model folder with it, so that engines can load a config that has no tokenizer.

It is a byte-level BPE in which every id 0 … vocab−1 decodes to non-empty text. Its tokens are the printable ASCII
characters and the words " a", " b", … " aa", " ab" …. Each word is merged from a shorter word and a letter, so that
decoded text encodes back to the same ids. (Transformers rebuilds the tokenizer of some model types from vocabulary and
merges alone.) Other characters are dropped. There are no special tokens, since servers omit those from a stream.
"""

from __future__ import annotations

import json
import os
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
SPACE, NEWLINE, TAB = "Ġ", "Ċ", "ĉ"  # as byte-level BPE vocabularies write them
CHARACTERS = [*(chr(c) for c in range(33, 127)), SPACE, NEWLINE, TAB]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens by id, merges in order)"""
    merges: list[tuple[str, str]] = []
    stems = iter([SPACE])
    words: list[str] = []
    while len(CHARACTERS) + len(words) < size:
        stem = next(stems)
        merges += [(stem, letter) for letter in string.ascii_lowercase[: size - len(CHARACTERS) - len(words)]]
        words += ["".join(pair) for pair in merges[len(words) :]]
        if stem == SPACE:
            stems = iter(words)  # the list grows during iteration: breadth first
    return [*CHARACTERS, *words][:size], merges


def tokenizer_json(vocab: int) -> dict[str, Any]:
    """The content of a tokenizer.json that the tokenizers library loads."""
    tokens, merges = vocabulary(vocab)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }


def write_model_folder(config: dict[str, Any], *, vocab: int, context: int, into: Path) -> Path:
    """Write config.json, generation_config.json and the tokenizer to `into`, unless it has them already; return `into`.

    The folder is replaced atomically. Raises ServebookError if it cannot be written.
    """
    files = {
        "tokenizer.json": tokenizer_json(vocab),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
            "chat_template": CHAT_TEMPLATE,
        },
        "generation_config.json": {"do_sample": False, "eos_token_id": config.get("eos_token_id")},
        "config.json": config,
    }
    texts = {name: json.dumps(content, ensure_ascii=False, separators=(",", ":")) for name, content in files.items()}

    def present() -> bool:
        return all((into / n).is_file() and (into / n).read_text(encoding="utf-8") == t for n, t in texts.items())

    if present():
        return into
    staging = None
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        staging.chmod(0o755)
        if into.exists():  # it has another config or an older version's files
            shutil.rmtree(into)
        os.replace(staging, into)
    except OSError as e:
        if not present():  # unless another starting engine wrote it in the meantime
            what = f"the model folder cannot be written ({e.strerror})"
            raise ServebookError(what, str(into), "Free the disk or choose another output folder") from None
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)
    return into
