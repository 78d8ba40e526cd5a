"""A synthetic tokenizer and the model folder around it, so that engines load a config that comes without one.

Every id 0 … vocab−1 decodes to text that is not empty: the printable ASCII characters come first, then one-word tokens
" aa", " ab" …, which encode back to the same ids. Text outside them becomes "?". There are no special tokens, so none
is hidden from a stream.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

from .errors import ServebookError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
SPACE = "▁"  # how the Metaspace pre-tokenizer writes a space
CHARACTERS = ["?", *sorted(set(string.ascii_letters + string.digits + string.punctuation + "\n\t") - {"?"}), SPACE]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def vocabulary(size: int) -> dict[str, int]:
    letters = (itertools.product(string.ascii_lowercase, repeat=n) for n in itertools.count(2))
    words = (SPACE + "".join(word) for group in letters for word in group)
    return {token: i for i, token in enumerate(itertools.islice(itertools.chain(CHARACTERS, words), size))}


def tokenizer_json(vocab: int) -> dict[str, Any]:
    """The content of a tokenizer.json that the tokenizers library loads: BPE without merges, whole words looked up."""
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": True}
    model = {"type": "BPE", "unk_token": "?", "fuse_unk": False, "byte_fallback": False, "ignore_merges": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": model | {"vocab": vocabulary(vocab), "merges": []},
    }


def write_model_folder(config: dict[str, Any], *, vocab: int, context: int, into: Path) -> Path:
    """Write config.json, generation_config.json and the tokenizer to `into`; leave it alone if it is there already.

    The folder appears whole or not at all. Raises ServebookError where it cannot be written.
    """
    files = {
        "tokenizer.json": tokenizer_json(vocab),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
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
        if into.exists():  # another config, or one written by an older version
            shutil.rmtree(into)
        os.replace(staging, into)
    except OSError as e:
        if not present():  # another engine's start may have written it meanwhile
            what = f"the model folder cannot be written ({e.strerror})"
            raise ServebookError(what, str(into), "Free the disk or choose another output folder") from None
    finally:
        if staging:
            shutil.rmtree(staging, ignore_errors=True)
    return into
