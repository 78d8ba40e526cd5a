"""Preflight: each seam found broken and found whole, with its fix. The machine is doubled only where it has no GPU."""

from __future__ import annotations

import contextlib
import http.server
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from servebook.cli import command as cli
from servebook.common.errors import ServebookError
from servebook.common.files import ROOT
from servebook.config import params
from servebook.config.params import RunParams
from servebook.hardware import catalog as hardware
from servebook.run import preflight
from test_hardware import FakeNvml

IDLE = {
    "gpu": "NVIDIA A40", "gpus": 1, "memory_total_bytes": 48 * 10**9,
    "driver": "580.65", "cuda_driver": 13.0, "utilization_percent": 0, "throttle_reasons": 0x1,
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
        asked: RunParams | None = None,
        **gpu: Any,
    ) -> None:
        super().__init__(asked, None, None)
        self.__dict__.update(gpu={**IDLE, **gpu}, torch_cuda=cuda, nvcc=nvcc)
        self.answers = {Path(sys.executable).name: (0, "0 0 1\n")} | (answers or {})  # CUDA starts, one device

    def output(self, *command: str, stdin: str = "", timeout_s: float = 7.0) -> tuple[int, str]:
        return self.answers.get(Path(command[0]).name) or super().output(*command, stdin=stdin)


def found(check: str, machine: preflight.Machine) -> preflight.Check:
    return next(c for c in preflight.checks_of(machine) if c.name == check)


def test_here_it_is_quick_complete_and_never_raises(tmp_path: Path) -> None:
    checks = preflight.run(run_params(), tmp_path, tmp_path / "not" / "there")
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
        (GpuMachine(answers={Path(sys.executable).name: (0, "999 3 0")}), "fail", "CUDA does not start (999 3 0)"),
        (GpuMachine(answers={Path(sys.executable).name: (1, "OSError: libcuda.so.1")}), "fail", "libcuda.so.1"),
    ],
)
def test_driver_against_torch(machine: GpuMachine, status: str, words: str) -> None:
    check = found("driver and CUDA runtime", machine)
    assert check.status == status and words in check.detail


def test_a_gpu_whose_driver_does_not_answer_is_not_taken_for_none() -> None:
    machine = preflight.Machine(None, None, None)
    machine.__dict__["silent_driver"] = "Failed to initialize NVML: Driver/library version mismatch"
    check = found("driver and CUDA runtime", machine)
    assert check.status == "fail" and "version mismatch" in check.detail and check.fix


def test_a_gpu_that_is_named_and_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-another-machine")
    check = found("driver and CUDA runtime", preflight.Machine(None, None, None))
    assert check.status == "fail" and "GPU-of-another-machine names no GPU of this machine" in check.detail
    with pytest.raises(ServebookError, match=r"CUDA_VISIBLE_DEVICES=GPU-of-another-machine: names no GPU"):
        hardware.detect()


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


COMPILES = {"nvcc": (0, "")}


@pytest.mark.parametrize(("gcc", "status"), [("12", "ok"), ("15.1.0", "ok"), ("16", "fail")])
def test_host_compiler_within_nvccs_range(tmp_path: Path, gcc: str, status: str) -> None:
    machine = GpuMachine(nvcc=toolkit(tmp_path, 15), answers={"gcc": (0, gcc), **COMPILES})
    check = found("host compiler for nvcc", machine)
    assert check.status == status and "15" in check.detail


def test_the_fix_for_the_host_compiler_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"gcc": (0, "16"), "g++-15": (0, "15"), **COMPILES}
    check = found("host compiler for nvcc", GpuMachine(nvcc=toolkit(tmp_path, 15), answers=versions))
    variable, _, value = check.fix.rpartition(" set ")[2].partition("=")
    monkeypatch.setenv(variable, value.strip("'"))
    after = found("host compiler for nvcc", GpuMachine(nvcc=tmp_path / "bin/nvcc", answers=versions))
    assert (check.status, after.status) == ("fail", "ok"), after.detail


def test_a_kernel_is_compiled_and_not_only_looked_up(tmp_path: Path) -> None:
    broken = {"gcc": (0, "12"), "nvcc": (1, "nvcc fatal : Failed to preprocess host compiler properties.")}
    check = found("host compiler for nvcc", GpuMachine(nvcc=toolkit(tmp_path, 15), answers=broken))
    assert check.status == "fail" and "Failed to preprocess" in check.detail and "-ccbin" in check.fix


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_gcc_that_was_pointed_elsewhere_has_no_cc1plus_though_gpp_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcc = script(tmp_path / "gcc-13", "case $1 in -print-prog-name=*) echo cc1plus;; *) echo 13;; esac")
    monkeypatch.setenv("CC", str(gcc))
    check = found("C++ toolchain", GpuMachine())
    assert check.status == "fail" and "has no cc1plus" in check.detail and "g++" in check.fix


def test_headers_that_are_there_and_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("Python headers", GpuMachine()).status == "ok"
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert "is missing" in found("Python headers", GpuMachine()).detail
    (tmp_path / "Python.h").write_text('#include "pyconfig-64.h"\n')  # a part of another package is gone
    check = found("Python headers", GpuMachine())
    assert check.status == "fail" and "does not compile" in check.detail and "-dev" in check.fix


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


@pytest.mark.parametrize(
    ("card", "gpu", "status", "words"),
    [
        ({"gpu": "A40"}, {}, "ok", "A40"),
        ({"gpu": "detect"}, {}, "skipped", ""),
        ({"gpu": "H200"}, {}, "fail", "the parameters are for H200, this machine has A40"),
        ({"gpu": "A40"}, {"gpu": "NVIDIA X1"}, "warn", "NVIDIA X1"),
    ],
)
def test_the_card_is_the_one_that_the_predictions_are_for(
    card: dict[str, Any], gpu: dict[str, Any], status: str, words: str
) -> None:
    check = found("GPU as in the parameters", GpuMachine(asked=run_params(hardware=card), **gpu))
    assert check.status == status and words in check.detail, check


def test_fewer_gpus_than_an_engine_needs() -> None:
    asked = run_params(hardware={"gpu": "A40"}, engines={"v": {"kind": "vllm", "tensor_parallel_size": 2}})
    assert "2 GPUs are needed, this machine has 1" in found("GPU as in the parameters", GpuMachine(asked=asked)).detail


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servebook.run.preflight.system.RESULTS_GB", 1e9)
    check = found("disk", preflight.Machine(run_params(), tmp_path, tmp_path / "run"))
    assert check.status == "fail" and "GB needed" in check.detail


def test_folders_are_written_to_and_programs_run_from_them(tmp_path: Path) -> None:
    assert found("output folder", preflight.Machine(None, None, tmp_path / "new" / "run")).status == "ok"
    assert list(tmp_path.iterdir()) == []
    check = found("output folder", preflight.Machine(None, None, Path("/proc/run")))
    assert check.status == "fail" and "/proc is not writable" in check.detail
    assert found("temporary folder", GpuMachine()).status == "ok"
    check = found("temporary folder", GpuMachine(answers={"sh": (126, "Permission denied")}))
    assert check.status == "fail" and "Permission denied" in check.detail and "TMPDIR" in check.fix


@pytest.mark.parametrize(("hard", "status"), [(3071, "fail"), (3072, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_file_descriptors_for_the_largest_concurrency(hard: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = {"kind": "concurrency", "prompt_tokens": 8, "output_tokens": 8, "concurrency": [1, 640]}
    uncapped = {"kind": "arrival_rate", "prompt_tokens": 8, "output_tokens": 8, "shares_of_capacity": [0.5]}
    machine = preflight.Machine(run_params(sweeps={"s": sweep, "open": uncapped}), None, None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (600, hard))  # what is needed is asked for
    check = found("open files", machine)
    assert check.status == status and "C = 640 needs 3072" in check.detail
    assert status == "ok" or "ulimit -Hn" in check.fix


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


def test_a_model_that_cannot_be_had_is_a_finding_and_takes_no_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**BASE, "model": {"hub": "nobody/nothing"}}))
    assert cli.main(["preflight", str(path)]) == 1
    assert "FAIL  model: nobody/nothing is not in the cache, and the Hub does not answer" in capsys.readouterr().out


@contextlib.contextmanager
def hub(status: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A Hub that answers everything with one status; the paths it was asked for."""
    asked: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield asked
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [(200, "ok", "grants access"), (401, "fail", "refuses it"), (404, "fail", "has no some/model at v1")],
)
def test_the_hub_is_asked_for_the_very_model(
    monkeypatch: pytest.MonkeyPatch, answer: int, status: str, words: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-4711")
    monkeypatch.setattr("servebook.model.read_shape", lambda *_: SimpleNamespace(weight_bytes=10**9))
    with hub(answer, monkeypatch) as asked:
        machine = preflight.Machine(run_params(model={"hub": "some/model", "revision": "v1"}), None, None)
        check = found("model", machine)
    assert set(asked) == {"/some/model/resolve/v1/config.json"}
    assert check.status == status and words in check.detail and "planted" not in f"{check}"


def test_the_cache_counts_for_the_revision_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from servebook.config.params import ModelParams
    from servebook.run.preflight import needs

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--a--b/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--a--b/refs").mkdir()
    (tmp_path / "models--a--b/refs/main").write_text("0123abc")
    dummy = {"hub": "a/b", "weights": "dummy"}
    has = [needs.cached(ModelParams(**dummy, revision=r)) for r in (None, "main", "0123abc", "v2")]
    assert has == [True, True, True, False]
    assert not needs.cached(ModelParams(hub="a/b")), "no weights there"


def preflight_config() -> Path:
    from servebook.model import reader as model

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


def test_bfloat16_on_a_processor_on_which_vllm_ends_is_a_warning():
    def engines_of(dtype: str, flags: set[str]) -> tuple[Any, ...]:
        text = (ROOT / "params/demo.yaml").read_text().replace("dtype: float32", f"dtype: {dtype}")
        machine = preflight.Machine(params.read_text(text), ROOT / "params", None)
        machine.gpu, machine.cpu_flags = None, flags  # type: ignore[misc]
        return preflight.needs.engines(machine)

    status, told, fix = engines_of("bfloat16", {"avx2", "amx_tile"})
    assert status == "warn" and "illegal instruction" in told and "float32" in fix
    assert engines_of("float32", {"avx2", "amx_tile"})[0] == engines_of("bfloat16", {"avx2"})[0] == "ok"
