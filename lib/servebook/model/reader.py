"""Reads a model's shape from its config.json, and writes a folder that engines can load. Independent of hardware."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from ..config.params import ModelParams
from . import checkpoint_formats, vllm_blueprint
from .counting import shape_of
from .quantization import none as unquantized
from .quantization import online
from .shape import DTYPE_BYTES, ModelShape
from .tree import text_of, tree_of

__all__ = ["ModelShape", "from_config", "materialize", "model_name", "packaged", "read_config", "read_shape"]

QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization")
HUB_TIMEOUT_S, CONNECT_S = 10.0, 1.5
PACKAGED = Path(__file__).parent / "configs"
# {Hub id: packaged config}; these models have the same shape at every revision
SHIPPED = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-FP8": "qwen3-30b-a3b-fp8",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b-v0.3",
    "google/gemma-2-9b": "gemma-2-9b",
}


def packaged() -> list[str]:
    """Names of the configs that come with servebook."""
    return sorted(p.stem for p in PACKAGED.glob("*.json"))


def from_config(
    config: dict[str, Any],
    *,
    name: str,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    dtype: str = "bfloat16",
    source: str | None = None,
    sidecar: dict[str, Any] | None = None,
) -> ModelShape:
    """The shape that a config.json describes. `source` names the file in errors (default: `name`).

    quantization: fp8, int8 (8-bit weights and activations) or int4 (weights only), applied by the engine at load. A
    checkpoint that is already quantized has a quantization_config, or ModelOpt's hf_quant_config.json (`sidecar`).
    Raises ServebookError for a model that is not supported.
    """
    where = source or name
    if not isinstance(config, dict):
        raise ServebookError("not a JSON object", where, "Expected a Hugging Face config.json")
    if config.get("is_encoder_decoder"):
        raise ServebookError("an encoder-decoder is not supported", where, "Use a decoder-only model")
    text = text_of(config)
    holders = [config, *([text] if isinstance(text, dict) else [])]
    given = next((c[k] for c in holders for k in QUANTIZATION_KEYS if c.get(k)), None)
    if given is not None and not isinstance(given, dict):
        raise ServebookError(f"its quantization is {given!r}, not an object", where, "Correct or remove it")
    experts = next((c["expert_dtype"] for c in holders if c.get("expert_dtype")), None)
    if given and experts:
        given = {"expert_dtype": experts, **given}
    stored = checkpoint_formats.of(given, sidecar, DTYPE_BYTES[dtype], where)
    if stored is not None and quantization and stored.weight_bits != int(quantization[-1]):
        raise ServebookError(
            f"quantization {quantization} requested for weights already quantized to {stored.weight_bits} bits",
            where,
            "Leave quantization out",
        )
    stored = stored or (online(quantization) if quantization else unquantized())
    shape = shape_of(tree_of(config, where), stored, name=name, dtype=dtype, kv_cache_dtype=kv_cache_dtype, where=where)
    return replace(shape, notes=(*shape.notes, *_notes(config, text, shape)))


def _notes(config: dict[str, Any], text: Any, shape: ModelShape) -> list[str]:
    """What the file leaves open, and whether vLLM has dropped the model."""
    notes = []
    if isinstance(text, dict) and shape.tied_embeddings and "tie_word_embeddings" not in config:
        size = shape.embedding_parameters * shape.element_bytes / 1e9
        notes.append(
            "its class ties the LM head to the embedding, the file does not say so: "
            f"a checkpoint with a head of its own has {size:.2f} GB more"
        )
    named = [last for a in config.get("architectures") or [] if (last := vllm_blueprint.last_version(str(a)))]
    if named:
        notes.append(
            f"vLLM {named[0]} was the last with a class for it; a newer one needs transformers' code, if at all"
        )
    return notes


def read_config(model: ModelParams, base: Path) -> tuple[dict[str, Any], str]:
    """(config.json as a dict, its location for error messages). base: the folder that relative paths start from.

    Raises ServebookError for an unknown packaged name, a missing folder or file, broken JSON, or a Hub id that
    cannot be fetched. From the Hub only config.json is downloaded.
    """
    if model.config:
        file = PACKAGED / f"{model.config}.json"
        if not file.is_file():
            near = difflib.get_close_matches(model.config, packaged(), 1, 0.4)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ServebookError(
                f"no packaged config {model.config!r}", "model.config", hint + f"There are: {', '.join(packaged())}"
            )
    elif model.path:
        folder = local_folder(model.path, base)
        file = folder / "config.json"
        if not folder.is_dir():
            raise ServebookError(
                "no such model folder", str(folder), "Correct model.path (relative to the parameter file)"
            )
        if not file.is_file():
            raise ServebookError(
                "the model folder has no config.json", str(folder), "Point model.path to a Hugging Face model folder"
            )
    elif model.hub in SHIPPED:
        file = PACKAGED / f"{SHIPPED[model.hub]}.json"  # a plan or a prediction needs no network for these
    else:
        file = _from_hub(str(model.hub), model.revision)
    try:
        return json.loads(file.read_text(encoding="utf-8")), str(file) if model.path else model_name(model)
    except (ValueError, RecursionError) as e:
        raise ServebookError(f"not valid JSON ({e})", str(file)) from None
    except OSError as e:
        raise ServebookError(f"cannot be read ({e.strerror})", str(file)) from None


def _from_hub(hub: str, revision: str | None) -> Path:
    import logging

    from huggingface_hub import hf_hub_download

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # hide its messages about retries
    fetch = functools.partial(hf_hub_download, hub, "config.json", revision=revision)
    try:
        if not (os.environ.get("HF_HUB_OFFLINE") or urllib.request.getproxies()):
            _within(CONNECT_S, _connect)  # the client itself retries for half a minute
        return Path(_within(HUB_TIMEOUT_S, fetch))
    except Exception as e:  # huggingface_hub raises dozens of kinds: connection, gated, not found, offline, bad id
        with contextlib.suppress(Exception):
            if isinstance(e, OSError):  # includes TimeoutError and HTTP errors: use the cached copy if there is one
                return Path(fetch(local_files_only=True))
        reason = "no answer in time" if isinstance(e, TimeoutError) else type(e).__name__
        reason = "no connection" if isinstance(e, socket.gaierror | ConnectionError) else reason
        raise ServebookError(
            f"its config.json could not be fetched from the Hub ({reason})",
            hub,
            "Check the id, the connection and HF_TOKEN, or give model.path or model.config",
        ) from None


def _connect() -> None:
    """Open a connection to the Hub and close it. Raises OSError."""
    from huggingface_hub import constants

    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    socket.create_connection((hub.hostname or "", port), timeout=CONNECT_S).close()


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of `work`, or its exception; TimeoutError after `seconds`. The thread is then abandoned: the Hub
    client cannot be cancelled, and retries for half a minute when offline."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append((work(), None))
        except BaseException as error:
            came.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not came:
        raise TimeoutError
    value, error = came[0]
    if error is not None:
        raise error
    return value


def local_folder(path: str, base: Path) -> Path:
    """A model's folder; relative paths start from `base`."""
    return (base / Path(path).expanduser()).resolve()


def model_name(model: ModelParams) -> str:
    """The model's name in the run and on the servers."""
    return model.config or model.hub or Path(str(model.path)).name


def read_shape(model: ModelParams, base: Path) -> ModelShape:
    """The shape of a run's model. Raises ServebookError as read_config and from_config do."""
    config, where = read_config(model, base)
    return from_config(
        config,
        name=model_name(model),
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        dtype=model.dtype,
        source=where,
        sidecar=read_sidecar(local_folder(model.path, base)) if model.path else None,
    )


def read_sidecar(folder: Path) -> dict[str, Any] | None:
    """The content of ModelOpt's hf_quant_config.json in a model folder; None if there is none."""
    file = folder / "hf_quant_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ServebookError(f"cannot be read ({e})", str(file), "Correct or remove it") from None
    return found if isinstance(found, dict) else None


def materialize(model: ModelParams, base: Path, into: Path) -> Path | str:
    """A folder or Hub id that vLLM and Transformers can load. The user's own folder is never written to.

    A packaged config, or a local folder without a tokenizer that is used with dummy weights, is written to
    `into`/<name> with a synthetic tokenizer. A folder that already has the same content is left as it is.
    """
    from .tokenizer import TOKENIZER_FILES, write_model_folder

    if model.hub:
        return model.hub
    if model.path:
        folder = local_folder(model.path, base)
        config, _ = read_config(model, base)
        if model.weights == "real" or any((folder / f).exists() for f in TOKENIZER_FILES):
            return folder
    config, _ = read_config(model, base)
    shape = read_shape(model, base)
    return write_model_folder(config, vocab=shape.vocab, context=shape.max_context_tokens, into=into / shape.name)
