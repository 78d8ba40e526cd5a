"""The fault matrix (docs/faults.md): real processes, ended or starved in the middle of a run, and what is left then.

Where the engine is not the subject, a mock server stands for it: one that runs already (MOCK, a URL), or one that the
run starts, owns and ends as any engine (OWNED, a command). Where it is, the naive server or vLLM with the tiny model.
A run is one notebook of the pipeline.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from mock_server import Behaviour, serving
from servebook.common.errors import ServebookError
from servebook.config.params import Load, Slo
from servebook.load import PointSpec, measure_point_sync
from servebook.run import notebook_execution, pipeline
from servebook.run.book import Book
from servebook.run_folder import results
from test_engines_process import gone

ROOT = Path(__file__).parents[1]
LOAD = "{warmup_requests: 1, min_requests: 8, max_requests: 40, min_seconds: 1.0, max_seconds: 3, jitter_s: 0.001}"
PARAMS = """
run: r
title: Faults
model: {{config: tiny-qwen2, weights: dummy, dtype: float32}}
hardware: {{gpu: detect}}
engines: {{e: {engine}}}
sweeps:
  short_prompts: {{kind: concurrency, prompt_tokens: 32, output_tokens: 8, concurrency: {c}}}
load: {load}
"""
NAIVE = "{kind: naive, device: cpu}"
PROGRAM = [sys.executable, str(Path(__file__).with_name("mock_server.py")), "--port"]
OWNED = f"{{kind: openai, command: {json.dumps([*PROGRAM, '{port}', 'ttft_s=0.02', 'itl_s=0.01'])}}}"
VLLM = "{kind: vllm, enforce_eager: true, max_model_len: 512, max_num_seqs: 4, max_num_batched_tokens: 256}"


def write_params(folder: Path, engine: str, *, c: str = "[1, 2, 4]", load: str = LOAD) -> Path:
    path = folder / "r.yaml"
    path.write_text(PARAMS.format(engine=engine, c=c, load=load))
    return path


@contextlib.contextmanager
def mocked(*settings: str) -> Iterator[str]:
    """An engine's params: a server in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen([*PROGRAM, str(port), "ttft_s=0.02", "itl_s=0.01", *settings], stdout=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"{{kind: openai, url: 'http://127.0.0.1:{port}'}}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    """A server for all tests here."""
    with mocked() as engine:
        yield engine


class Run:
    """`servebook run` of the sweep's notebook (or another command), and every process that it brings about."""

    def __init__(
        self, params: Path, *, only: str = "03_short_prompts", command: Sequence[str] = (), preexec: Any = None,
        **env: str,
    ) -> None:  # fmt: skip
        name, *options = command or ("run", *(["--only", only] if only else []))
        self.dir, self.log = params.parent / "out/r", params.parent / "said.txt"
        self.mark = f"FAULT_{os.urandom(4).hex()}"
        with self.log.open("a") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "servebook.cli", name, str(params), *options],
                env={**os.environ, "SERVEBOOK_OUTPUTS": str(params.parent / "out"), self.mark: "1", **env},
                stdout=said, stderr=said, cwd=ROOT, preexec_fn=preexec,
            )  # fmt: skip

    def until(self, happened: Callable[[], Any], within_s: float = 90) -> Any:
        end = time.monotonic() + within_s
        while not (found := happened()):
            assert time.monotonic() < end and self.process.poll() is None, self.said
            time.sleep(0.03)
        return found

    def measuring(self, point: str) -> int:
        """Wait until a point has rows; their number then."""
        rows = self.dir / f"requests/short_prompts/e/{point}.jsonl"
        return self.until(lambda: rows.exists() and rows.read_bytes().count(b"\n"))

    def processes(self) -> list[psutil.Process]:
        """All that carry this run's mark in their environment, whatever their parent."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self.mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kernel(self) -> psutil.Process:
        """The kernel: forked from the process with the notebooks' imports, with the same command line."""
        forks = {p.pid: p for p in self.processes() if "servebook.run.kernel_process" in p.cmdline()}
        return next(p for p in forks.values() if p.ppid() in forks)

    def end(self, within_s: float = 90) -> int:
        """The exit status; fails where anything of the run is left."""
        status = self.process.wait(within_s)
        left = [p for p in self.processes() if not gone(p.pid)]
        assert not left, [p.cmdline() for p in left]
        return status

    @property
    def said(self) -> str:
        return self.log.read_text()

    def points(self) -> list[str]:
        return [p.point_id for p in results.read_points(self.dir)]

    def faults(self) -> list[str]:
        lines = [line for line in self.said.splitlines() if line.startswith("servebook: ")]
        return [line for line in lines if not line.startswith("servebook: warning: ")]


def complete_rows(run_dir: Path, point: str) -> int:
    return len(results.read_rows(results.rows_path(run_dir, "short_prompts", "e", point)))


def test_a_killed_kernel_costs_its_point_and_the_notebook_is_run_again(tmp_path: Path, mock: str) -> None:
    run = Run(write_params(tmp_path, mock, c="[1, 2]"))
    rows = run.measuring("c0002")
    run.kernel().kill()
    assert run.end() == 0, run.said
    assert "kernel of 03_short_prompts.ipynb died; running it again" in run.said
    assert run.points() == ["c0001", "c0002"]
    aside = run.dir / "requests/short_prompts/e/c0002.jsonl.old1"
    assert aside.read_bytes().count(b"\n") >= rows, "its rows are kept aside"
    assert run.said.count("c0001 done") <= 1, "what was measured is not measured again"


def test_a_killed_pipeline_leaves_nothing_and_the_next_goes_on_where_it_stopped(tmp_path: Path) -> None:
    params = write_params(tmp_path, OWNED, c="[1, 2]")
    run = Run(params)
    run.until(lambda: "starting e" in run.said)
    second = Run(params)  # two runs into one folder
    assert second.process.wait(60) == 1 and "another run is writing here" in second.said
    rows = run.measuring("c0002")
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    first = (run.dir / "requests/short_prompts/e/c0001.json").read_bytes()
    assert complete_rows(run.dir, "c0002") >= rows
    cut_off = not (run.dir / "requests/short_prompts/e/c0002.json").exists()  # else it had just ended
    again = Run(params)
    assert again.end() == 0, again.said
    assert again.points() == ["c0001", "c0002"]
    assert (run.dir / "requests/short_prompts/e/c0001.json").read_bytes() == first
    spent = Book.at(run.dir).cost()
    shares = [spent[f"{kind}_share"] for kind in ("measuring", "starting", "overhead")]
    assert sum(shares) == pytest.approx(1) and all(0 < share < 1 for share in shares), "over both sessions"
    assert ("] short_prompts e c0002: measured again, it was cut off after" in again.said) == cut_off, again.said


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        ("predicting", signal.SIGTERM),
        ("starting", signal.SIGTERM),
        ("measuring", signal.SIGINT),
        ("measuring", signal.SIGHUP),
        ("analysing", signal.SIGINT),
    ],
)
def test_ctrl_c_sigterm_and_a_closed_terminal_are_orderly(tmp_path: Path, stage: str, sent: signal.Signals) -> None:
    only = {"predicting": "01_prediction", "analysing": "07_analysis"}.get(stage, "03_short_prompts")
    run = Run(write_params(tmp_path, NAIVE if stage == "starting" else OWNED), only=only)
    if stage == "starting":
        run.until((run.dir / "engines/e.json").exists)
    elif stage == "measuring":
        run.measuring("c0001")
    else:
        run.until(lambda: only in run.said)
        time.sleep(1.0)  # its kernel is starting
    run.process.send_signal(sent)
    assert run.end() == 130
    assert "Traceback" not in run.said and run.said.splitlines()[-1].startswith("servebook: interrupted")
    assert json.loads((run.dir / "provenance.json").read_text())["sessions"][-1]["seconds"] is not None
    if stage in ("starting", "measuring"):
        assert json.loads((run.dir / "engines/e.json").read_text())["process"] is None
    if stage == "measuring":
        assert complete_rows(run.dir, "c0001") >= 1
        assert [n["what"] for n in Book.at(run.dir).sessions.spent()] == ["starting", "lost", "ending"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("when", ["starting", "serving", "twice"])
def test_serve_is_meant_to_end_by_a_signal(tmp_path: Path, sent: signal.Signals, when: str) -> None:
    served = Run(write_params(tmp_path, OWNED), command=("serve", "--engine", "e"))
    if when == "starting":
        served.until((served.dir / "engines/e.json").exists)
    else:
        served.until(lambda: "servebook measure" in served.said)
    if when == "twice":
        os.kill(json.loads((served.dir / "engines/e.json").read_text())["pid"], signal.SIGSTOP)
        served.process.send_signal(sent)
        time.sleep(1.0)
    served.process.send_signal(sent)
    assert served.end() == (130 if when == "twice" else 0), served.said
    assert served.said.splitlines()[-1] == ("servebook: ended at once" if when == "twice" else "e ended")
    assert "Traceback" not in served.said


def test_ctrl_c_twice_is_now(tmp_path: Path) -> None:
    run = Run(write_params(tmp_path, OWNED))
    run.measuring("c0001")
    server = next(
        p for p in run.processes() if "mock_server" in " ".join(p.cmdline()) and "guard" not in str(p.cmdline())
    )
    server.suspend()  # would take the whole grace to end in order
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert "Traceback" not in run.said and "ended at once" in run.said


def test_a_killed_server_costs_one_point_and_the_report_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(write_params(tmp_path, OWNED), only="short_prompts")
    run.measuring("c0002")
    os.kill(json.loads((run.dir / "engines/e.json").read_text())["pid"], signal.SIGKILL)
    assert run.end() == 1
    assert run.points() == ["c0001", "c0004"]
    fault = run.faults()
    assert len(fault) == 1 and "short_prompts, e: C = 2 not measured: e ended (SIGKILL" in fault[0]
    page = (run.dir / "report.html").read_text()
    assert "C\u00a0=\u00a02 not measured: e ended (SIGKILL" in html.unescape(page)
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "out"))
    book = Book.open(tmp_path / "r.yaml")
    assert book.point_status.missing("e", ["short_prompts"], None)
    book.measure("short_prompts", "e")
    assert run.points() == ["c0001", "c0002", "c0004"] and book.stopped() == []


# --- the engine's faults, without notebooks: Book.measure is what they call ---------------------------------------


def strike(book: Book, point: str, blow: Callable[[int], None]) -> threading.Thread:
    """Do something to the engine once a point has rows; `blow` gets the server's pid."""
    rows = results.rows_path(book.dir, "short_prompts", "e", point)

    def wait() -> None:
        while not (rows.exists() and rows.stat().st_size):
            time.sleep(0.02)
        blow(book.facts("e")["pid"])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def book_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Book]:
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "out"))

    def opened(engine: str, **how: str) -> Book:
        return Book.open(write_params(tmp_path, engine, **how), create=True)

    return opened


def measured(book: Book) -> list[str]:
    return [p.point_id for p in book.stored_points()]


def test_a_frozen_server_is_found_out_ended_and_started_again(
    book_of: Callable[..., Book], monkeypatch: pytest.MonkeyPatch
) -> None:
    from servebook.engines import base

    monkeypatch.setattr(base, "HEALTH_S", 2.0)
    book = book_of(OWNED, c="[1, 2]")
    frozen: list[int] = []
    strike(book, "c0001", lambda pid: (frozen.append(pid), os.kill(pid, signal.SIGSTOP))[0])
    book.measure("short_prompts", "e")
    assert measured(book) == ["c0002"] and gone(frozen[0])
    assert (
        "C = 1 not measured: e hangs: no answer from /health within 2 s"
        in book.point_status.faults("e", "short_prompts")[0]
    )


def test_a_killed_naive_server_costs_one_point(book_of: Callable[..., Book]) -> None:
    book = book_of(NAIVE, c="[1, 2]")
    strike(book, "c0001", lambda pid: os.kill(pid, signal.SIGKILL))
    book.measure("short_prompts", "e")
    assert measured(book) == ["c0002"]
    assert book.stopped()[0]["why"].startswith("e ended (SIGKILL")


@pytest.mark.engine
def test_a_killed_engine_core_and_a_killed_api_server_cost_a_point_each(book_of: Callable[..., Book]) -> None:
    book = book_of(VLLM)
    cores: list[int] = []

    def kill_core(pid: int) -> None:
        below = psutil.Process(pid).children(recursive=True)
        cores.extend(p.pid for p in below)
        next(p for p in below if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline())).kill()

    strike(book, "c0001", kill_core)
    strike(book, "c0004", lambda pid: os.kill(pid, signal.SIGKILL))
    book.measure("short_prompts", "e")
    assert measured(book) == ["c0002"]
    first, second = book.stopped()
    assert first["why"].startswith("e ended") and first["points"] == ["c0001"] and first["log"], first
    assert second["why"].startswith("e ended (SIGKILL") and second["points"] == ["c0004"]
    assert cores and all(gone(pid) for pid in [*cores, book.facts("e")["pid"]])


def test_an_engine_that_fails_at_two_points_in_a_row_is_left(book_of: Callable[..., Book]) -> None:
    book = book_of(OWNED, c="[1, 2, 3, 4]")
    for point in ("c0001", "c0002"):
        strike(book, point, lambda pid: os.kill(pid, signal.SIGKILL))
    book.measure("short_prompts", "e")
    assert measured(book) == []
    whys = [s["why"] for s in book.stopped()]
    assert len(whys) == 4 and all("two points in a row" in w for w in whys[2:])


def test_an_engine_that_may_not_be_restarted_costs_the_rest_of_the_session(
    book_of: Callable[..., Book], tmp_path: Path
) -> None:
    book = book_of(OWNED[:-1] + ", restart_after_failure: false}", c="[1, 2]")
    other = {**book.params.sweeps, "long_prompts": book.params.sweeps["short_prompts"]}
    book = Book(book.params.model_copy(update={"sweeps": other}), book.dir, book.base)
    book.predict()
    sweeps = [s for s in pipeline.steps(book.params, str(tmp_path / "r.yaml")) if s.sweep]
    outcome, progress = pipeline.RunOutcome(), pipeline.Progress(book, len(sweeps))
    book.begin_session(None)
    strike(book, "c0001", lambda pid: os.kill(pid, signal.SIGKILL))
    pipeline._execute(book, sweeps, progress, outcome)
    progress.close()
    assert measured(book) == [] and len(book.stopped()) == 4
    assert [f.split(":")[0] for f in outcome.faults] == ["short_prompts, e"] * 2 + ["long_prompts, e"] * 2
    assert "C = 1 not measured: e ended (SIGKILL" in outcome.faults[0]
    assert all("is not started again (restart_after_failure: false)" in f for f in outcome.faults[1:])
    assert [n["what"] for n in book.sessions.spent()] == ["starting", "lost", "ending"]
    made_with = book.point_status.made_with(book.specs("e", "short_prompts")[0])
    assert "restart_after_failure" not in made_with["engine"], "the parameter alone re-measures nothing"


def test_out_of_memory_at_start_is_one_line(tmp_path: Path, book_of: Callable[..., Book]) -> None:
    program = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_AS, (700 << 20,) * 2)\n"
        "from servebook.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(write_params(tmp_path, NAIVE)), "--engine", "e"],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "engines.e: ended at start" in done.stderr, done.stderr


# --- disks, folders, clocks, files, parameters --------------------------------------------------------------------


def test_a_full_disk_while_rows_are_appended(tmp_path: Path, mock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    load = LOAD.replace("max_requests: 40", "max_requests: 4000").replace("min_requests: 8", "min_requests: 2000")
    params = write_params(tmp_path, mock, c="[64]", load=load)
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "out"))
    Book.open(params, create=True).predict()  # its file is larger
    run = Run(params, preexec=small_files)
    assert run.end() == 1
    assert "cannot write" in run.said and "Traceback" not in run.said, run.said
    rows = results.rows_path(run.dir, "short_prompts", "e", "c0064")
    kept = results.read_rows(rows)
    assert len(kept) > 10 and kept.notes == [] and run.points() == []
    Book.open(params).measure("short_prompts", "e")
    assert run.points() == ["c0064"] and rows.with_name("c0064.jsonl.old1").exists()


def without_override() -> None:
    """For root: permissions count for the programs it starts from here on."""
    import ctypes

    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE


@pytest.mark.parametrize("what", ["out", "out/r"])
def test_a_read_only_folder_is_one_line(tmp_path: Path, book_of: Callable[..., Book], mock: str, what: str) -> None:
    if what == "out/r":
        book_of(mock).predict()
    params = write_params(tmp_path, mock)
    (tmp_path / what).mkdir(exist_ok=True)
    (tmp_path / what).chmod(0o555)
    run = Run(params, preexec=without_override)
    status = run.end()
    (tmp_path / what).chmod(0o755)
    assert status == 1
    assert len(run.said.splitlines()) == 1 and "cannot write" in run.said, run.said


def test_a_kernel_that_does_not_exist_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_execution, "KERNEL", "nosuch")
    with pytest.raises(ServebookError, match=r"01_prediction.ipynb: there is no Jupyter kernel 'nosuch'. Install"):
        notebook_execution.execute(pipeline.NOTEBOOKS / "01_prediction.ipynb", tmp_path / "x.ipynb", {"PARAMS": "p"})


def test_a_stepped_clock_changes_no_latency(
    book_of: Callable[..., Book], mock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(mock, c="[1]")
    real, begun = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() - (3600.0 if time.monotonic() - begun > 0.7 else 0.0))
    book.measure("short_prompts", "e")
    point = book.stored_points()[0]
    assert point.failures == 0 and 0 < point.ttft_mean_s <= point.e2e_mean_s < 1800
    assert 0 < point.seconds < 1800


def test_a_file_cut_at_every_byte_of_its_last_row_loses_that_row_alone(tmp_path: Path) -> None:
    rows = [json.dumps({"i": i, "phase": "measured", "error": "schön", "gaps_ms": [1.5, i]}) for i in range(3)]
    whole = "".join(f"{r}\n" for r in rows).encode()
    start = len(whole) - len(rows[-1].encode()) - 1
    path = tmp_path / "c0001.jsonl"
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        read = results.read_rows(path)
        assert [r["i"] for r in read] == [0, 1], cut
        assert bool(read.notes) == (cut > start) and path.read_bytes() == whole[:start]


def test_a_torn_row_of_a_point_that_was_cut_off_is_repaired_and_told(
    book_of: Callable[..., Book], mock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    book = book_of(mock, c="[1]")
    rows = results.rows_path(book.dir, "short_prompts", "e", "c0001")
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b'{"i":0}\n{"i":1}\n{"i":2,"ph')
    book.measure("short_prompts", "e")
    said = capsys.readouterr().out
    told = (
        "c0001: measured again, it was cut off after 2 requests; c0001.jsonl: a torn last line of 10 bytes was cut off"
    )
    assert told in said, said
    assert rows.with_name("c0001.jsonl.old1").read_bytes() == b'{"i":0}\n{"i":1}\n' and measured(book) == ["c0001"]


def test_another_fact_of_the_server_measures_again_and_says_why(
    book_of: Callable[..., Book], mock: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(mock, c="[1]")
    book.measure("short_prompts", "e")
    spec = book.specs("e", "short_prompts")[0]
    assert book.point_status.kept(spec)
    monkeypatch.setattr(book, "facts", lambda name: {"version": "9.9", "kv_cache_tokens": 1234})
    assert 'version was null, is "9.9"' in (book.point_status.start(spec) or "")


def test_changed_parameters_measure_what_changed_and_say_why(
    book_of: Callable[..., Book], mock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    book = book_of(mock, c="[1, 2]")
    book.measure("short_prompts", "e")
    capsys.readouterr()
    book = book_of(mock, c="[1, 2, 4]")  # a point more: only that
    before = {p: (book.dir / f"requests/short_prompts/e/{p}.json").read_bytes() for p in measured(book)}
    book.measure("short_prompts", "e")
    said = capsys.readouterr().out
    assert "c0004 done" in said and "c0001" not in said and measured(book) == ["c0001", "c0002", "c0004"]
    assert all((book.dir / f"requests/short_prompts/e/{p}.json").read_bytes() == b for p, b in before.items())
    other = LOAD.replace("max_requests: 40", "max_requests: 50")
    book = book_of(mock, c="[1, 2]", load=other)
    assert measured(book) == [] and book.left_out() == "3 stored points are of other parameters and left out"
    book = book_of(mock, c="[1, 2, 4]")  # back again
    assert measured(book) == ["c0001", "c0002", "c0004"] and book.left_out() is None
    book = book_of(mock, c="[1, 2]", load=other)
    book.measure("short_prompts", "e")
    said = capsys.readouterr().out
    assert "c0001: measured again, load.max_requests was 40, is 50" in said
    assert measured(book) == ["c0001", "c0002"] and (book.left_out() or "").startswith("1 stored point is")
    aside = book.dir / "requests/short_prompts/e"
    assert (aside / "c0001.json.old1").read_bytes() == before["c0001"] and (aside / "c0001.jsonl.old1").exists()


def test_a_key_is_sent_as_bearer_and_is_in_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "planted-4711-secret"
    env = dict.fromkeys(("THE_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"), secret)
    with mocked(f"key={secret}") as server:  # answers nobody without the key
        keyed = server.replace("}", ", api_key_env: THE_KEY}")
        run = Run(write_params(tmp_path, keyed, c="[1]"), **env)
        assert run.end() == 0, run.said
        point = results.read_point(run.dir, "short_prompts", "e", "c0001")
        assert point and point.requests >= 8 and point.failures == 0
        assert point.server_running_mean is not None, "the counters were asked with the key as well"
        monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "out"))
        monkeypatch.setenv("THE_KEY", f"{secret}-wrong")
        with pytest.raises(ServebookError, match="refuses the key"):
            Book.open(write_params(tmp_path, keyed, c="[2]"), create=True).measure("short_prompts", "e")
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 15 and any(p.name == "report.html" for p in files)
    assert [p for p in files if secret.encode() in p.read_bytes()] == []


def test_a_key_that_a_server_quotes_is_not_stored(tmp_path: Path) -> None:
    secret, spec = "planted-4711-secret", PointSpec("s", "e", "c0002", "concurrency", 8, 4, concurrency=2)
    quick = Load(warmup_requests=1, min_requests=8, max_requests=12, min_seconds=0, jitter_s=0)
    with serving(Behaviour(key=secret, fail_every=4, echo_key=True)) as server:
        known = {"url": server.url, "model": "mock", "vocab": range(100), "load": quick, "slo": Slo(), "batching": True}
        with pytest.raises(ServebookError) as refused:
            measure_point_sync(spec, **known, run_dir=tmp_path / "other", api_key=f"{secret}-wrong")
        point = measure_point_sync(spec, **known, run_dir=tmp_path, api_key=secret)
    assert "Incorrect API key provided: Bearer [key]" in refused.value.what
    rows = results.read_rows(results.rows_path(tmp_path, "s", "e", "c0002"))
    assert point.failures and {r["error"] for r in rows if r["error"]} >= {"HTTP 500: out of order for [key]"}
    assert [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()] == []


@pytest.mark.parametrize(
    ("engine", "expect"),
    [
        ("{kind: openai, url: 'http://me:s3cr3t@127.0.0.1:9'}", "url holds more than an address"),
        ("{kind: openai, url: 'http://127.0.0.1:9/?api_key=s3cr3t'}", "url holds more than an address"),
        ("{kind: vllm, env: {HF_TOKEN: s3cr3t}}", "env sets HF_TOKEN"),
        ("{kind: vllm, extra_args: ['--api-key=s3cr3t']}", "extra_args has --api-key"),
        ("{kind: vllm, extra_args: ['--hf_token', s3cr3t]}", "extra_args has --hf_token"),
        ("{kind: openai, command: [env, HF_TOKEN=s3cr3t, serve, '{port}']}", "command has HF_TOKEN"),
        ("{kind: openai, command: [serve, '{port}', --header, 'Bearer s3cr3t']}", "command has a bearer token"),
    ],
)
def test_a_key_in_the_parameters_is_refused_before_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, expect: str
) -> None:
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "out"))
    with pytest.raises(ServebookError, match=re.escape(expect)) as fault:
        Book.open(write_params(tmp_path, engine), create=True)
    assert "s3cr3t" not in str(fault.value) and not (tmp_path / "out").exists()
