"""Effects of a server's command-line flags on its prediction.

extra_args are vLLM's own flags, as typed. Flags that matter are applied to the settings. Flags that affect neither
times nor sizes are ignored. Any other flag is listed in a note as not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.errors import ServebookError
from ..config.engines import BatchingEngine
from ..model.shape import ModelShape

SIZES = {
    "max-num-batched-tokens": "max_num_batched_tokens", "max-num-seqs": "max_num_seqs",
    "max-model-len": "max_model_len", "tensor-parallel-size": "tensor_parallel_size", "tp": "tensor_parallel_size",
    "pipeline-parallel-size": "pipeline_parallel_size", "pp": "pipeline_parallel_size",
    "data-parallel-size": "data_parallel_size", "dp": "data_parallel_size",
}  # fmt: skip
SWITCHES = {
    "enforce-eager": ("enforce_eager", True), "no-enforce-eager": ("enforce_eager", False),
    "enable-expert-parallel": ("enable_expert_parallel", True), "ep": ("enable_expert_parallel", True),
    "no-enable-expert-parallel": ("enable_expert_parallel", False),
    "enable-prefix-caching": ("prefix_caching", True), "no-enable-prefix-caching": ("prefix_caching", False),
}  # fmt: skip
FACTS = {"async-scheduling": ("async_scheduling", True), "no-async-scheduling": ("async_scheduling", False)}
# flags that a search for a set-up sets itself
SEARCHED = {*SIZES, *SWITCHES, "quantization", "q", "kv-cache-dtype"} - {
    "max-model-len", "enforce-eager", "no-enforce-eager",
}  # fmt: skip
# flags without effect on times and sizes: names, logs, templates, parsers, sources of weights
SILENT = re.compile(
    r"^(no-)?(served-model-name|host|port|api-key|seed|tokenizer.*|revision|code-revision|download-dir|load-format"
    r"|trust-remote-code|chat-template.*|.*-parser|enable-auto-tool-choice|generation-config|uvicorn-log-level"
    r"|enable-log-.*|disable-log-.*|disable-uvicorn-access-log|max-log-len|allowed-.*|allow-credentials|root-path"
    r"|ssl-.*|middleware|response-role|return-tokens-as-token-ids|enable-request-id-headers|enable-chunked-prefill"
    r"|distributed-executor-backend|hf-token|hf-config-path|config-format|skip-tokenizer-init|model|task|runner"
    r"|enable-server-load-tracking|enable-prompt-tokens-details|enable-force-include-usage|show-hidden-metrics.*"
    r"|otlp-traces-endpoint|collect-detailed-traces|limit-mm-per-prompt|allowed-local-media-path|override-generation.*"
    r"|data-parallel-(address|rpc-port|backend)|device|numa.*)$"
)


@dataclass
class WithFlags:
    """An engine's settings and model with its flags applied. facts: limits that the server would report. notes: flags
    that are not modelled."""

    engine: BatchingEngine
    shape: ModelShape
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def with_flags(engine: BatchingEngine, shape: ModelShape, where: str) -> WithFlags:
    """The engine's settings and model with its extra_args applied. Raises ServebookError for an invalid value."""
    changes: dict[str, Any] = {}
    out = WithFlags(engine, shape)
    unread: list[str] = []
    for flag, value in pairs(getattr(engine, "extra_args", None) or []):
        if flag in SIZES:
            changes[SIZES[flag]] = _count(flag, value, where)
        elif flag in SWITCHES:
            name, state = SWITCHES[flag]
            changes[name] = state
        elif flag in FACTS:
            name, state = FACTS[flag]
            out.facts[name] = state
        elif flag == "block-size":
            out.facts["block_size"] = _count(flag, value, where)
        elif flag == "gpu-memory-utilization":
            changes["gpu_memory_utilization"] = _share(flag, value, where)
        elif flag in MODEL:
            changed = MODEL[flag](out.shape, str(value))
            if changed is None:
                unread.append(f"--{flag} {value}")
            else:
                out.shape = changed
        elif not SILENT.match(flag):
            unread.append(f"--{flag}")
    if changes:
        out.engine = engine.model_copy(update=changes)
    if unread:
        out.notes.append(f"not modelled: {', '.join(dict.fromkeys(unread))} ({where}.extra_args)")
    return out


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The (flag without dashes, value or None) pairs of a command line."""
    flat = [part for word in words for part in str(word).split()]
    at = 0
    while at < len(flat):
        word = flat[at]
        at += 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and at < len(flat) and not flat[at].startswith("-"):
            value, equals = flat[at], "="
            at += 1
        yield name.replace("_", "-"), value if equals else None


def _count(flag: str, value: str | None, where: str) -> int:
    """A whole number in vLLM's notation: 32768, 32k, 32K (32 × 1,024), 1m."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", value or "")
    factor = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
    size = int(float(found.group(1)) * factor[found.group(2)]) if found else 0
    if size <= 0:
        raise ServebookError(f"--{flag} is {value!r}, not a positive whole number", f"{where}.extra_args", "Correct it")
    return size


def _share(flag: str, value: str | None, where: str) -> float:
    try:
        share = float(value or "")
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ServebookError(f"--{flag} is {value!r}, not a number from 0 to 1", f"{where}.extra_args", "Correct it")
    return share


def _kv_dtype(shape: ModelShape, value: str) -> ModelShape | None:
    if value in ("auto", "bfloat16", "float16"):
        return shape
    return shape.with_fp8_kv() if value.startswith("fp8") else None


def _quantization(shape: ModelShape, value: str) -> ModelShape | None:
    if shape.quantization != "none":
        return shape  # the checkpoint's own quantization applies
    return shape.with_fp8_weights() if value.startswith("fp8") else None


def _dtype(shape: ModelShape, value: str) -> ModelShape | None:
    return shape if value in ("auto", shape.dtype) or {value, shape.dtype} == {"bfloat16", "float16"} else None


MODEL: Mapping[str, Callable[[ModelShape, str], ModelShape | None]] = {
    "kv-cache-dtype": _kv_dtype, "quantization": _quantization, "q": _quantization, "dtype": _dtype,
}  # fmt: skip
