"""Preflight: each seam found broken and found whole, with its fix. The machine is doubled only where it has no GPU."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servebook import preflight
from servebook.params import RunParams

IDLE = {
    "gpu": "NVIDIA A40", "driver": "580.65", "cuda_driver": 13.0, "utilization_percent": 0, "throttle_reasons": 0x1,
    "temperature_c": 35, "power_limit_w": 300.0, "memory_used_bytes": 300 * 2**20, "processes": [], "ecc": True,
}  # fmt: skip
BASE: dict[str, Any] = {
    "run": "t", "title": "t", "model": {"config": "tiny-qwen2", "weights": "dummy"}, "hardware": {"gpu": "detect"},
    "engines": {"hf": {"kind": "naive"}},
}  # fmt: skip


def run_params(**changes: Any) -> RunParams:
    return RunParams.model_validate({**BASE, **changes})


class GpuMachine(preflight.Machine):
    """A machine with a GPU: what NVML and the toolkit would say, given."""

    def __init__(
        self,
        *,
        cuda: tuple[int, int] | None = (13, 0),
        nvcc: Path | None = None,
        answers: dict[str, tuple[int, str]] | None = None,
        **gpu: Any,
    ) -> None:
        super().__init__(None, None, None)
        self.__dict__.update(gpu={**IDLE, **gpu}, torch_cuda=cuda, nvcc=nvcc)
        self.answers = answers or {}

    def output(self, *command: str, stdin: str = "") -> tuple[int, str]:
        return self.answers.get(Path(command[0]).name) or super().output(*command, stdin=stdin)


def found(check: str, machine: preflight.Machine) -> preflight.Check:
    return next(c for c in preflight.checks_of(machine) if c.name == check)


def test_here_it_is_quick_complete_and_never_raises(tmp_path: Path) -> None:
    begun = time.monotonic()
    checks = preflight.run(run_params(), tmp_path, tmp_path / "not" / "there")
    assert time.monotonic() - begun < 10
    assert [c.name for c in checks] == list(preflight.CHECKS)
    assert not [c for c in checks if c.status == "fail"], preflight.text(checks)
    assert all(c.fix for c in checks if c.status in ("warn", "fail"))
    assert preflight.run(None, None, None)


@pytest.mark.parametrize(
    ("machine", "status", "words"),
    [
        (GpuMachine(), "ok", "offers CUDA 13"),
        (GpuMachine(cuda_driver=12.4), "fail", "CUDA 12.4"),
        (GpuMachine(cuda=(13, 1)), "warn", "one major version"),
        (GpuMachine(cuda=None), "fail", "built for the CPU"),
    ],
)
def test_driver_against_torch(machine: GpuMachine, status: str, words: str) -> None:
    check = found("driver and CUDA runtime", machine)
    assert check.status == status and words in check.detail


def toolkit(folder: Path, newest_gcc: int) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin/nvcc").write_text("")
    header = folder / "targets/x86_64-linux/include/crt/host_config.h"
    header.parent.mkdir(parents=True)
    header.write_text(
        f"#if defined(__GNUC__)\n#if __GNUC__ > {newest_gcc}\n#error -- unsupported GNU version!\n#endif\n#endif\n"
    )
    return folder / "bin/nvcc"


@pytest.mark.parametrize(("release", "status"), [("13.0", "ok"), ("12.8", "fail")])
def test_nvcc_of_torchs_major_version(tmp_path: Path, release: str, status: str) -> None:
    said = f"Cuda compilation tools, release {release}, V{release}.88"
    machine = GpuMachine(nvcc=toolkit(tmp_path, 15), answers={"nvcc": (0, said)})
    assert found("nvcc", machine).status == status


def test_nvcc_missing_or_broken(tmp_path: Path) -> None:
    assert found("nvcc", GpuMachine()).status == "warn"
    assert (
        found("nvcc", GpuMachine(nvcc=toolkit(tmp_path, 15), answers={"nvcc": (127, "No such file")})).status == "fail"
    )


@pytest.mark.parametrize(("gcc", "status"), [("12", "ok"), ("15.1.0", "ok"), ("16", "fail")])
def test_host_compiler_within_nvccs_range(tmp_path: Path, gcc: str, status: str) -> None:
    check = found("host compiler for nvcc", GpuMachine(nvcc=toolkit(tmp_path, 15), answers={"gcc": (0, gcc)}))
    assert check.status == status and "15" in check.detail


def test_compiler_without_cc1plus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text(
        "#!/bin/sh\necho \"g++: fatal error: cannot execute 'cc1plus': execvp: No such file or directory\"; exit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    check = found("C++ toolchain", GpuMachine())
    assert check.status == "fail" and "cc1plus" in check.detail and "g++" in check.fix
    assert found("C++ toolchain", preflight.Machine(run_params(), None, None)).status == "warn", (
        "nothing is compiled there"
    )


@pytest.mark.parametrize(
    ("check", "gpu", "status", "words"),
    [
        ("GPU idle, not throttled", {}, "ok", "0 % busy"),
        ("GPU idle, not throttled", {"utilization_percent": 80}, "fail", "80 % busy"),
        ("GPU idle, not throttled", {"throttle_reasons": 0x40}, "fail", "hardware thermal slowdown"),
        ("GPU memory", {}, "ok", "no other process"),
        ("GPU memory", {"processes": [4711]}, "fail", "4711"),
        ("GPU memory", {"memory_used_bytes": 20 * 2**30}, "warn", "20.0 GiB"),
        ("GPU ECC", {}, "ok", "ECC on"),
        ("GPU ECC", {"ecc": "not available"}, "ok", "not reported"),
    ],
)
def test_state_of_the_gpu(check: str, gpu: dict[str, Any], status: str, words: str) -> None:
    result = found(check, GpuMachine(**gpu))
    assert result.status == status and words in result.detail


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RESULTS_GB", 1e9)
    check = found("disk", preflight.Machine(run_params(), tmp_path, tmp_path / "run"))
    assert check.status == "fail" and "GB needed" in check.detail


def test_file_descriptors_for_the_largest_concurrency() -> None:
    sweep = {"kind": "concurrency", "prompt_tokens": 8, "output_tokens": 8, "concurrency": [1, 64]}
    machine = preflight.Machine(run_params(sweeps={"s": sweep}), None, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        check = found("open files", machine)
        assert check.status == "fail" and "C = 64" in check.detail and "ulimit -n" in check.fix
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        machine = preflight.Machine(run_params(engines={"hf": {"kind": "naive", "port": port}}), None, None)
        check = found("ports", machine)
        assert check.status == "fail" and f"{port} (hf)" in check.detail


def test_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = preflight.Machine(run_params(model={"path": "nowhere"}), tmp_path, None)
    assert found("model", missing).status == "fail"
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text((preflight_config()).read_text())
    bare = preflight.Machine(run_params(model={"path": "bare"}), tmp_path, None)
    assert found("model", bare).detail == "bare has no weight files"
    (folder / "model.safetensors").write_bytes(b"")
    assert found("model", preflight.Machine(run_params(model={"path": "bare"}), tmp_path, None)).status == "ok"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = preflight.Machine(run_params(model={"hub": "nobody/nothing"}), tmp_path, None)
    check = found("model", hub)
    assert check.status == "fail" and "HF_HUB_OFFLINE" in check.detail


def preflight_config() -> Path:
    from servebook import model

    return Path(model.PACKAGED) / "tiny-qwen2.json"


def test_an_engine_that_cannot_run_is_a_warning_while_another_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from servebook.engines import vllm

    monkeypatch.setattr(vllm, "why_unsupported", lambda on_cpu: ("needs AVX2", ""))
    both = {"hf": {"kind": "naive"}, "v": {"kind": "vllm"}}
    assert found("engines", preflight.Machine(run_params(engines=both), None, None)).status == "warn"
    assert found("engines", preflight.Machine(run_params(engines={"v": {"kind": "vllm"}}), None, None)).status == "fail"


def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: preflight.Machine) -> Any:
        raise RuntimeError("boom")

    checks: dict[str, Callable] = {"disk": broken, "clock": preflight.CHECKS["clock"]}
    monkeypatch.setattr(preflight, "CHECKS", checks)
    disk, clock = preflight.run(None, None, None)
    assert disk.status == "warn" and "boom" in disk.detail and clock.status != "fail"
    assert "→" in preflight.text([disk])
