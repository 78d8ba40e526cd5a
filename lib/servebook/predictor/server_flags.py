"""Effects of a server's command-line flags on its prediction.

extra_args are vLLM's own flags, as typed. Flags that matter are applied to the settings. Flags that affect neither
times nor sizes are ignored. Any other flag is listed in a note as not modelled.
"""

from __future__ import annotations

import json
import re
import shlex
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
FACTS = {
    "async-scheduling": ("async_scheduling", True), "no-async-scheduling": ("async_scheduling", False),
    "disable-hybrid-kv-cache-manager": ("hybrid_kv_cache", False),
    "no-disable-hybrid-kv-cache-manager": ("hybrid_kv_cache", True),
}  # fmt: skip
COUNTED = {
    "block-size": "block_size", "num-gpu-blocks-override": "kv_blocks", "kv-cache-memory-bytes": "kv_bytes",
    "max-cudagraph-capture-size": "captured_tokens",
}  # fmt: skip
SAME = {
    "device-memory-utilization": "gpu-memory-utilization", "cc": "compilation-config", "O": "optimization-level",
    "sc": "speculative-config", "ac": "attention-config", "dc": "diffusion-config", "n": "nnodes", "r": "node-rank",
    "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size", "asc": "api-server-count",
}  # fmt: skip
# flags that a search for a set-up sets itself
SEARCHED = {*SIZES, *SWITCHES, "quantization", "q", "kv-cache-dtype"} - {
    "max-model-len", "enforce-eager", "no-enforce-eager",
}  # fmt: skip
# flags without effect on times and sizes: names, logs, templates, parsers, sources of weights
SILENT = re.compile(
    r"^(no-)?(served-model-name|host|port|api-key|seed|tokenizer.*|revision|code-revision|download-dir|load-format"
    r"|trust-remote-code|chat-template.*|.*-parser|enable-auto-tool-choice|generation-config|uvicorn-log-level"
    r"|enable-log-.*|disable-log-.*|disable-uvicorn-access-log|max-log-len|allowed-.*|allow-credentials|root-path"
    r"|ssl-.*|middleware|response-role|return-tokens-as-token-ids|enable-request-id-headers"
    r"|distributed-executor-backend|hf-token|config-format|skip-tokenizer-init|model|task|runner"
    r"|enable-server-load-tracking|enable-prompt-tokens-details|enable-force-include-usage|show-hidden-metrics.*"
    r"|otlp-traces-endpoint|collect-detailed-traces|allowed-local-media-path|override-generation.*"
    r"|data-parallel-(address|rpc-port|backend)|device|numa.*|.*-parser-plugin|enable-ssl-refresh|disable-fastapi-docs"
    r"|enable-offline-docs|uds|h11-.*|log-.*|logging-config|kv-cache-metrics.*|disable-access-log-.*|shutdown-timeout"
    r"|trust-request-.*|default-chat-template-kwargs|exclude-tools-when-.*|tool-server|enable-tokenizer-info-endpoint"
    r"|safetensors-.*|model-loader-extra-config|max-parallel-loading-workers|use-tqdm-on-load|pt-load-map-location"
    r"|ignore-patterns|fail-on-environ-validation|aggregate-engine-logging|master-(addr|port)|max-logprobs"
    r"|prefix-caching-hash-algo|enable-per-request-metrics)$|^enable-chunked-prefill$"
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
        if flag == "max-model-len" and value in ("auto", "-1"):
            out.facts["longest_that_fits"] = True
        elif flag in SIZES:
            changes[SIZES[flag]] = _count(flag, value, where)
        elif flag in SWITCHES:
            name, state = SWITCHES[flag]
            changes[name] = state
        elif flag in FACTS:
            name, state = FACTS[flag]
            out.facts[name] = state
        elif flag in COUNTED:
            out.facts[COUNTED[flag]] = _count(flag, value, where)
        elif flag == "cudagraph-capture-sizes":
            out.facts["captured_tokens"] = max(_count(flag, v, where) for v in re.split(r"[\s,]+", value or ""))
        elif flag == "gpu-memory-utilization":
            changes["gpu_memory_utilization"] = _share(flag, value, where)
        elif flag == "language-model-only":
            out.shape = out.shape.without_towers()
        elif flag.partition(".")[0] == "limit-mm-per-prompt":
            if out.shape.towers and re.search(r"\b0\b", value or ""):
                unread.append(f"--{flag} (the towers are counted)")
        elif flag in MODEL:
            if value is None:
                raise ServebookError(f"--{flag} has no value", f"{where}.extra_args", "Give one or remove it")
            changed = MODEL[flag](out.shape, str(value))
            if changed is None:
                unread.append(f"--{flag} {value}")
            else:
                out.shape = changed
        elif flag == "optimization-level" and value in ("0", "2", "3"):
            changes["enforce_eager"] = value == "0"  # 2 is the default; 3 does the same so far
        elif flag.partition(".")[0] == "compilation-config":
            unread += _compilation(flag, value, out.facts, where)
        elif not SILENT.match(flag):
            unread.append(f"--{flag}")
    if changes:
        out.engine = engine.model_copy(update=changes)
    if unread:
        out.notes.append(f"not modelled: {', '.join(dict.fromkeys(unread))} ({where}.extra_args)")
    return out


def _whole(typed: str) -> str:
    """The flag that vLLM's parser takes a typed one for: another name of it, or the start of only one. A key of a JSON
    flag may follow after a dot."""
    if "." in typed:
        base, _, key = typed.partition(".")
        return f"{_whole(base)}.{key}"
    if typed in SAME or typed in KNOWN or len(typed) < 4 or SILENT.match(typed):
        return SAME.get(typed, typed)
    longer = [f for f in KNOWN if f.startswith(typed)]
    return SAME.get(longer[0], longer[0]) if len(longer) == 1 else typed


def _compilation(flag: str, value: str | None, facts: dict[str, Any], where: str) -> list[str]:
    """The keys of --compilation-config that are not modelled. Its CUDA graph settings are added to `facts`."""
    name, _, key = flag.partition(".")
    try:
        given = {key.replace("-", "_"): _plain(value)} if key else json.loads(value or "")
        items = list(given.items())
    except (ValueError, AttributeError):
        raise ServebookError(f"--{name} is {value!r}, not a JSON object", f"{where}.extra_args", "Correct it") from None
    unread = []
    for key, given in items:
        if key == "cudagraph_mode":
            facts["cuda_graphs"] = str(given).upper() != "NONE"
        elif key == "max_cudagraph_capture_size":
            facts["captured_tokens"] = _count(f"{name}.{key}", str(given), where)
        elif key == "cudagraph_capture_sizes" and isinstance(given, list) and given:
            facts["captured_tokens"] = max(_count(f"{name}.{key}", str(n), where) for n in given)
        else:
            unread.append(f"--{name} ({key})")
    return unread


def _plain(value: str | None) -> Any:
    """A value of a JSON flag's key: JSON, or else the text itself."""
    try:
        return json.loads(value or "")
    except ValueError:
        return value


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The (whole flag without dashes, value or None) pairs of a command line; several values are joined by spaces.

    A word may hold a flag with its value, or several flags; JSON stays whole.
    """
    flat = [part for word in words for part in _parts(str(word))]
    at = 0
    while at < len(flat):
        word = flat[at]
        at += 1
        if not _is_flag(word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        values = [value] if equals else []
        while not equals and at < len(flat) and not _is_flag(flat[at]):
            values.append(flat[at])
            at += 1
        if re.fullmatch(r"-O\d", word):
            name, values = "O", [word[2:]]
        yield _whole(name.replace("_", "-")), " ".join(values) if values else None


def _parts(word: str) -> list[str]:
    if not _is_flag(word) or not re.search(r"\s", word):
        return [word]
    if found := re.match(r"(--?[\w.-]+)(?:=|\s+)([{\[].*)$", word, re.DOTALL):
        return [found.group(1), found.group(2)]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()


def _is_flag(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def _count(flag: str, value: str | None, where: str) -> int:
    """A whole number in vLLM's notation: 32768, 32k, 32K (32 × 1,024), 1m."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value or "")
    factor = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
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
    value = {"half": "float16", "float": "float32"}.get(value, value)
    return shape if value in ("auto", shape.dtype) or {value, shape.dtype} == {"bfloat16", "float16"} else None


MODEL: Mapping[str, Callable[[ModelShape, str], ModelShape | None]] = {
    "kv-cache-dtype": _kv_dtype, "quantization": _quantization, "q": _quantization, "dtype": _dtype,
}  # fmt: skip
KNOWN = {
    *SIZES, *SWITCHES, *FACTS, *COUNTED, *SAME, *MODEL, "gpu-memory-utilization", "optimization-level",
    "compilation-config", "cudagraph-capture-sizes", "language-model-only", "limit-mm-per-prompt",
}  # fmt: skip
