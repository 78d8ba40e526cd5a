"""Facts that a server reports: vLLM 0.26 to 0.33 by API, metrics and start-up log, SGLang by its info page.

Every fact is optional: if a line is missing or worded differently, its fact is None ("not reported").
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .http import get_json, http_get, served_models

# keys of every engine's facts; None: not reported
FACT_KEYS = (
    "kind", "name", "url", "pid", "version", "model", "attention_backend", "kv_cache_tokens", "kv_cache_gib",
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "prefix_caching", "chunked_prefill", "async_scheduling",
    "cuda_graphs", "cuda_graph_gib", "weights_gib", "activation_gib", "startup_s", "flags", "block_size", "dtype",
    "device", "threads", "quantization", "kv_cache_dtype", "executor", "sampler", "peer_access",
)  # fmt: skip

MOST = 1 << 50  # a petabyte, or tokens: more is a slip

INTEGER = r"([\d,]+)"
NUMBER = r"([\d.]+)"

# fact → patterns; the first matching pattern wins, and its last occurrence in the log (a restart logs again)
NUMBERS: dict[str, tuple[str, ...]] = {
    "kv_cache_tokens": (rf"KV cache size: {INTEGER} tokens",),
    "kv_cache_gib": (rf"Available KV cache memory: {NUMBER} GiB", rf"set \({NUMBER}/[\d.]+\) GiB for KV cache"),
    "max_num_batched_tokens": (
        rf"Chunked prefill is enabled with max_num_batched_tokens={INTEGER}",
        rf"'max_num_batched_tokens': {INTEGER}",
        # the upper end of the compiled range is the token budget
        r"compile_ranges_(?:endpoints|split_points)': \[(?:\d+, )*(\d+)\]",
    ),
    "max_num_seqs": (rf"'max_num_seqs': {INTEGER}",),
    "weights_gib": (rf"Model loading took {NUMBER} GiB",),
    "activation_gib": (rf"{NUMBER} GiB for peak activation", rf"PyTorch activation peak memory takes {NUMBER}\s*GiB"),
    "cuda_graph_gib": (rf"Graph capturing finished in {NUMBER} secs, took (?P<value>[\d.]+) GiB",),
}
FLAGS = {
    "prefix_caching": r"enable_prefix_caching=(True|False)",
    "chunked_prefill": r"(?:enable_chunked_prefill|chunked_prefill_enabled)=(True|False)",
}
TEXTS = {
    "quantization": r"[( ,]quantization=(\w[\w-]*)",
    "kv_cache_dtype": r"[( ,]kv_cache_dtype=(\w+)",
    "dtype": r"[( ,]dtype=torch\.(\w+)",
    "device": r"[( ,]device_config=(\w+)",
    # the sampler chosen at start-up; a request without top-p and top-k, or with its own seed, uses the native one
    "sampler": r"Using (\w+) for top-p (?:&|and) top-k sampling",
}


def blank_facts(**known: Any) -> dict[str, Any]:
    """Facts with every key present, None where not (yet) reported."""
    return {**dict.fromkeys(FACT_KEYS), **known}


def vllm_facts(url: str, log: Path, *, flags: list[str], cpu_threads: str | None) -> dict[str, Any]:
    """Facts of an answering vLLM server from all sources; see FACT_KEYS. cpu_threads: None on a GPU."""
    facts = from_log(log.read_text(errors="replace") if log.exists() else "")
    facts = merge(facts, from_flags(flags))
    facts = merge(facts, from_metrics((http_get(f"{url}/metrics") or b"").decode(errors="replace")))
    version = get_json(f"{url}/version")
    facts["version"] = version.get("version") if isinstance(version, dict) else facts["version"]
    facts["max_model_len"] = next(
        (n for m in served_models(url) if (n := count(m.get("max_model_len")))), facts["max_model_len"]
    )
    if cpu_threads is not None:
        facts["threads"] = int(cpu_threads) if cpu_threads.isdecimal() else None
        facts["attention_backend"] = facts["attention_backend"] or "CPU"
        facts["cuda_graphs"] = False
        # vLLM's CPU platform disables it, whatever was requested (platforms/cpu.py)
        facts["async_scheduling"] = False
    return {**facts, "flags": flags}


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The first's facts, completed with the second's."""
    return {**first, **{k: v for k, v in second.items() if v is not None and first.get(k) is None}}


def count(value: Any) -> int | None:
    """A number of tokens, requests or bytes, None for what no server has: predictions divide by it."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST else None


def from_log(text: str) -> dict[str, Any]:
    """Facts from the text of a start-up log."""
    facts = blank_facts()
    for key, patterns in NUMBERS.items():
        facts[key] = next((v for v in (_number(p, text) for p in patterns) if v is not None), None)
    for key, pattern in FLAGS.items():
        found = re.findall(pattern, text)
        facts[key] = found[-1] == "True" if found else None
    for key, pattern in TEXTS.items():
        found = re.findall(pattern, text)
        facts[key] = found[-1] if found and found[-1] != "None" else None
    found = re.findall(r"V1 LLM engine \(v([^)]+)\)", text)
    facts["version"] = found[-1] if found else None
    facts["attention_backend"] = _attention(text)
    facts["cuda_graphs"] = _cuda_graphs(text)
    facts["async_scheduling"] = _async_scheduling(text)
    if re.search(r"[Cc]ustom allreduce is disabled because your platform lacks GPU P2P", text):
        facts["peer_access"] = False
    found = re.findall(r"max_seq_len=(\d+)", text) or re.findall(r"Using max model len (\d+)", text)
    facts["max_model_len"] = int(found[-1]) if found else None
    return facts


def from_flags(flags: list[str]) -> dict[str, Any]:
    """Facts that follow from the server's start flags."""
    given = dict(zip(flags, [*flags[1:], ""], strict=False))
    found: dict[str, Any] = {
        key: int(given[flag]) for key in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
        if (flag := f"--{key.replace('_', '-')}") in given and given[flag].isdecimal()
    }  # fmt: skip
    if "--enforce-eager" in given:
        found["cuda_graphs"] = False
    if "--async-scheduling" in given or "--no-async-scheduling" in given:
        found["async_scheduling"] = "--async-scheduling" in given
    if "--distributed-executor-backend" in given:
        found["executor"] = given["--distributed-executor-backend"]
    return found


def from_metrics(text: str) -> dict[str, Any]:
    """Facts from the labels of vllm:cache_config_info."""
    line = next((x for x in text.splitlines() if x.startswith("vllm:cache_config_info{")), "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line))

    def whole(key: str) -> int | None:
        return count(int(labels[key])) if re.fullmatch("[0-9]{1,18}", labels.get(key, "")) else None

    block = whole("block_size")
    blocks = whole("num_gpu_blocks")
    tokens = whole("kv_cache_size_tokens") or (block * blocks if block and blocks else None)
    memory = whole("kv_cache_memory_bytes")
    return {
        "block_size": block,
        "kv_cache_tokens": tokens,
        "kv_cache_gib": round(memory / 2**30, 3) if memory else None,
        "prefix_caching": {"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
    }


def from_sglang(info: dict[str, Any]) -> dict[str, Any]:
    """Facts from SGLang's /get_server_info: its arguments with resolved defaults, and its scheduler's limits.

    chunked_prefill_size limits a prefill step. Unlike vLLM, SGLang decodes in separate steps unless enable_mixed_chunk
    is on. Values of the wrong type count as not reported.
    """
    if "max_total_num_tokens" not in info:
        return {}

    def whole(key: str) -> int | None:
        return count(info.get(key))

    def unless(key: str) -> bool | None:
        return None if not isinstance(info.get(key), bool) else not info[key]

    def named(key: str) -> str | None:
        value = info.get(key)
        return value if isinstance(value, str) and value != "auto" else None

    chunk = whole("chunked_prefill_size")
    return {
        "version": f"SGLang {info['version']}" if info.get("version") else None,
        "kv_cache_tokens": whole("max_total_num_tokens"),
        "max_num_batched_tokens": chunk or whole("max_prefill_tokens"),
        "chunked_prefill": chunk is not None,
        "max_num_seqs": whole("max_running_requests"),
        "max_model_len": whole("context_length"),
        "block_size": whole("page_size"),
        "prefix_caching": unless("disable_radix_cache"),
        "cuda_graphs": unless("disable_cuda_graph"),
        "async_scheduling": unless("disable_overlap_schedule"),
        "attention_backend": named("attention_backend"),
        "quantization": named("quantization"),
        "kv_cache_dtype": named("kv_cache_dtype"),
        "dtype": named("dtype"),
        "device": named("device"),
    }


def _number(pattern: str, text: str) -> float | int | None:
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    match = found[-1]
    value = (match["value"] if "value" in match.groupdict() else match[1]).replace(",", "").rstrip(".")
    try:
        return float(value) if "." in value else int(value)
    except ValueError:
        return None


def _attention(text: str) -> str | None:
    """The backend's name, with FlashAttention's version: FLASH_ATTN_2, FLASH_ATTN_3, FLASHINFER, TRITON_ATTN …"""
    found = re.findall(
        r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend(?: out of| on V1|[.,]|$)", text, re.M
    )
    version = re.findall(r"Using FlashAttention version (\d)", text)
    if not found:
        found = re.findall(r"Using (Flash Attention|FlashInfer|Triton)(?: attention)? backend", text)
        found = [
            {"Flash Attention": "FLASH_ATTN", "FlashInfer": "FLASHINFER", "Triton": "TRITON_ATTN"}[f] for f in found
        ]
    if not found:
        return f"FLASH_ATTN_{version[-1]}" if version else None
    return f"FLASH_ATTN_{version[-1]}" if found[-1] == "FLASH_ATTN" and version else found[-1]


def _cuda_graphs(text: str) -> bool | None:
    if "Graph capturing finished" in text:
        return True
    found = re.findall(r"enforce_eager=(True|False)", text)
    return False if found and found[-1] == "True" else None


def _async_scheduling(text: str) -> bool | None:
    if re.search(r"Asynchronous scheduling is enabled", text):
        return True
    if re.search(r"Asynchronous scheduling (?:is disabled|will be disabled|is not supported)|[Dd]isabling async", text):
        return False
    found = re.findall(r"'?async_scheduling'?[=:]\s*(True|False)", text)
    return found[-1] == "True" if found else None
