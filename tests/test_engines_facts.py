"""Facts and causes of death from vLLM's logs, as worded by 0.19–0.26 on a GPU and by 0.32 on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from servebook.engines import facts, logs
from servebook.engines.facts import FACT_KEYS

CUDA = """\
(APIServer pid=1) INFO 04-16 11:16:06 [utils.py:297] non-default args: {'max_num_seqs': 128}
(APIServer pid=1) INFO 04-16 11:16:17 [model.py:549] Resolved architecture: Qwen2ForCausalLM
(APIServer pid=1) INFO 04-16 11:16:17 [model.py:1678] Using max model len 8704
(APIServer pid=1) INFO 04-16 11:16:17 [scheduler.py:239] Chunked prefill is enabled with max_num_batched_tokens=2048.
(APIServer pid=1) INFO 04-16 11:16:17 [vllm.py:790] Asynchronous scheduling is enabled.
(EngineCore pid=7) INFO 04-16 11:16:23 [core.py:105] Initializing a V1 LLM engine (v0.26.0) with config: model='m', \
dtype=torch.bfloat16, max_seq_len=8704, load_format=dummy, quantization=fp8, enforce_eager=False, kv_cache_dtype=auto, \
device_config=cuda, enable_prefix_caching=True, enable_chunked_prefill=True, compilation_config={'mode': 3, \
'compile_ranges_endpoints': [2048]}
(EngineCore pid=7) INFO 04-16 11:16:25 [cuda.py:317] Using FLASH_ATTN attention backend out of potential backends: \
['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION'].
(EngineCore pid=7) INFO 04-16 11:16:25 [flash_attn.py:598] Using FlashAttention version 3
(EngineCore pid=7) INFO 04-16 11:16:29 [gpu_model_runner.py:5150] Model loading took 14.25 GiB memory and 3.2 seconds
(EngineCore pid=7) INFO 04-16 11:16:59 [gpu_worker.py:760] Available KV cache memory: 23.55 GiB
(EngineCore pid=7) INFO 04-16 11:16:59 [kv_cache_utils.py:1087] GPU KV cache size: 430,528 tokens
(EngineCore pid=7) INFO 04-16 11:16:59 [kv_cache_utils.py:1091] Maximum concurrency for 8,704 tokens: 49.46x
(EngineCore pid=7) INFO 04-16 11:17:04 [gpu_model_runner.py:6582] Graph capturing finished in 5 secs, took 0.52 GiB
(EngineCore pid=7) INFO 04-16 11:17:04 [gpu_worker.py:1035] Free memory on device (44.1/44.5 GiB) on startup. Desired \
GPU memory utilization is (0.9, 40.1 GiB). Actual usage is 14.25 GiB for consumed memory (weights + non-torch), \
1.41 GiB for peak activation, and 0.52 GiB for CUDAGraph memory. Current kv cache memory in use is 23.55 GiB.
"""

CPU = """\
(APIServer pid=7894) INFO 11-29 14:45:01 [api_utils.py:286] non-default args: {'model': 'm', 'max_model_len': 8704}
(APIServer pid=7894) INFO 11-29 14:45:11 [model.py:2152] Using max model len 8704
(EngineCore pid=8237) INFO 11-29 14:45:18 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', \
dtype=torch.bfloat16, max_seq_len=8704, load_format=dummy, quantization=None, quantization_config=None, \
enforce_eager=True, kv_cache_dtype=auto, device_config=cpu, enable_prefix_caching=True, enable_chunked_prefill=True, \
compilation_config={'mode': 0, 'compile_ranges_endpoints': [2048], 'inductor_compile_config': {}}
(Worker pid=8408) INFO 11-29 14:45:28 [cpu_worker.py:260] Explicitly set (1.0/10.09) GiB for KV cache on node 0.
(EngineCore pid=8237) INFO 11-29 14:45:28 [kv_cache_utils.py:2327] CPU KV cache size: 1,048,576 tokens, Maximum \
concurrency for 8,704 tokens per request: 120.47x
"""

METRICS = (
    'vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",enable_prefix_caching="False",'
    'kv_cache_memory_bytes="1073741824",kv_cache_size_tokens="1048576",num_gpu_blocks="8192"} 1.0\n'
)


def test_cuda_log() -> None:
    found = facts.from_log(CUDA)
    expected = {
        "version": "0.26.0", "attention_backend": "FLASH_ATTN_3", "kv_cache_tokens": 430_528, "kv_cache_gib": 23.55,
        "max_num_batched_tokens": 2048, "max_num_seqs": 128, "max_model_len": 8704, "prefix_caching": True,
        "chunked_prefill": True, "async_scheduling": True, "cuda_graphs": True, "cuda_graph_gib": 0.52,
        "weights_gib": 14.25, "activation_gib": 1.41, "quantization": "fp8", "kv_cache_dtype": "auto",
        "dtype": "bfloat16", "device": "cuda",
    }  # fmt: skip
    assert {k: found[k] for k in expected} == expected


def test_cpu_log() -> None:
    found = facts.from_log(CPU)
    expected = {
        "version": "0.32.0", "attention_backend": None, "kv_cache_tokens": 1_048_576, "kv_cache_gib": 1.0,
        "max_num_batched_tokens": 2048, "max_num_seqs": None, "cuda_graphs": False, "quantization": None,
        "async_scheduling": None, "weights_gib": None, "device": "cpu",
    }  # fmt: skip
    assert {k: found[k] for k in expected} == expected


def test_a_log_tells_of_missing_peer_access() -> None:
    line = "Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed."
    assert facts.from_log(line)["peer_access"] is False
    assert facts.from_log(CUDA)["peer_access"] is None


def test_a_log_without_known_lines_reports_nothing() -> None:
    found = facts.from_log("INFO something else entirely\nGPU KV cache size: many tokens\n")
    assert set(found) == set(FACT_KEYS) and not any(v is not None for v in found.values())


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("[cuda.py:215] Using Flash Attention backend on V1 engine.", "FLASH_ATTN"),
        ("[cuda.py:405] Using FLASHINFER attention backend out of potential backends: ['FLASHINFER'].", "FLASHINFER"),
        ("Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
        ("[flash_attn.py:598] Using FlashAttention version 2", "FLASH_ATTN_2"),
        ("[api.py:1] Using FlashInfer for top-p & top-k sampling.", None),
        ("[mm.py:373] Using AttentionBackendEnum.FLASH_ATTN for MMEncoderAttention.", None),
    ],
)
def test_attention_backend_wordings(line: str, backend: str | None) -> None:
    assert facts.from_log(line)["attention_backend"] == backend


def test_last_start_in_a_log_counts() -> None:
    assert (
        facts.from_log("GPU KV cache size: 1,000 tokens\nGPU KV cache size: 2,000 tokens\n")["kv_cache_tokens"] == 2000
    )


def test_metrics_and_flags_fill_what_the_log_lacks() -> None:
    flags = ["--max-num-seqs", "16", "--enforce-eager", "--distributed-executor-backend", "uni"]
    found = facts.merge(facts.merge(facts.from_log(""), facts.from_flags(flags)), facts.from_metrics(METRICS))
    expected = {
        "max_num_seqs": 16,
        "cuda_graphs": False,
        "executor": "uni",
        "block_size": 128,
        "kv_cache_tokens": 1_048_576,
    }
    assert {k: found[k] for k in expected} == expected
    assert found["prefix_caching"] is False and found["kv_cache_gib"] == 1.0
    assert facts.from_metrics("# nothing")["kv_cache_tokens"] is None


def test_cause_is_the_engines_own_exception() -> None:
    log = """\
(EngineCore pid=3) ERROR 11-29 14:45:32 [core.py:900] EngineCore failed to start.
(EngineCore pid=3) ERROR 11-29 14:45:32 [core.py:900] Traceback (most recent call last):
(EngineCore pid=3) ERROR 11-29 14:45:32 [core.py:900]   File "core.py", line 849, in run
(EngineCore pid=3) ERROR 11-29 14:45:32 [core.py:900] torch.OutOfMemoryError: CUDA out of memory. Tried to get 2 GiB
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_0': 1}
""".splitlines()
    assert logs.cause(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to get 2 GiB"
    assert "gpu_memory_utilization" in logs.fix(log, Path("x.log"))


def test_cause_of_other_deaths() -> None:
    usage = ["usage: api_server.py [options]", "api_server.py: error: unrecognized arguments: --max-seqs"]
    assert logs.cause(usage) == "api_server.py: error: unrecognized arguments: --max-seqs"
    assert "extra_args" in logs.fix(usage, Path("x.log"))
    assert logs.cause(["INFO 11-29 14:45:32 [a.py:1] loading", ""]) == "loading"
    assert logs.cause([]) == "" and "x.log" in logs.fix([], Path("x.log"))


def test_tail_of_a_large_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"\xff line\n" * 200_000 + b"the end\n")
    assert logs.tail(log, 2)[-1] == "the end" and logs.tail(tmp_path / "none.log", 5) == []
