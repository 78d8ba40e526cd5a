"""The whole book once, with both real engines on this machine's CPU, and what a second command does with it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.engine

QUICK = {  # the demo with fewer and shorter points: old → new
    "run: demo": "run: quick",
    "requests: 8}": "requests: 3}",
    "requests: 5}": "requests: 3}",
    "prompt_tokens: [64, 256, 512, 1024]": "prompt_tokens: [64, 256]",
    "concurrency: [1, 2, 4, 8]": "concurrency: [1, 4]",
    "shares_of_capacity: [0.3, 0.6]": "shares_of_capacity: [0.5]",
    "min_requests: 12": "min_requests: 6",
    "max_requests: 40": "max_requests: 12",
    "min_seconds: 2": "min_seconds: 0",
    "max_seconds: 8": "max_seconds: 60",  # points end by their requests; few arrive in an open loop on a busy machine
}


def servebook(*args, outputs, cwd=ROOT, timeout=1800):
    return subprocess.run(
        [sys.executable, "-m", "servebook.cli", *args],
        cwd=cwd,
        env={**os.environ, "SERVEBOOK_OUTPUTS": str(outputs)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(run folder, finished process) of one quick run."""
    folder = tmp_path_factory.mktemp("end-to-end")
    text = (ROOT / "params/demo.yaml").read_text()
    for old, new in QUICK.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "quick.yaml").write_text(text)
    done = servebook("run", str(folder / "quick.yaml"), outputs=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "quick", done


def points_of(run):
    return [json.loads(p.read_text()) for p in sorted(run.glob("requests/*/*/*.json"))]


def test_every_point_of_both_engines_is_measured(finished):
    run, _ = finished
    points = points_of(run)
    assert {(p["sweep"], p["engine"]) for p in points} == {
        (s, e)
        for s in ("calibration", "short_prompts", "long_prompts", "prompt_length", "arrival_rate")
        for e in ("hf", "vllm")
    } | {("prefix_cache", "vllm")}
    assert len(points) == 2 * (2 + 2 + 2 + 2 + 1) + 4
    for p in points:
        # an open loop does not wait: on a busy machine its last arrivals may be cut off by the time limit
        assert p["failures"] == 0 or p["kind"] == "arrival_rate", (p["sweep"], p["engine"], p["point"], p["errors"])
        assert p["requests"] > 0, (p["sweep"], p["engine"], p["point"])
        # a client that gets no processor reads a whole answer at once: no TPOT, and the audit says so
        assert p["ttft_mean_s"] > 0 and (p["tpot_mean_s"] or p["verdict"] == "suspect")
        rows = [
            json.loads(line) for line in (run / "requests" / p["sweep"] / p["engine"] / f"{p['point']}.jsonl").open()
        ]
        measured = [r for r in rows if r["phase"] == "measured"]
        assert len(measured) == p["requests"] + p["failures"]
        lengths = {(r["prompt_tokens"], r["output_tokens"]) for r in measured if r["ok"]}
        assert lengths == {(p["prompt_tokens"], p["output_tokens"])}


def test_the_batching_engine_runs_requests_together_and_the_naive_one_does_not(finished):
    run, _ = finished
    at = {(p["engine"], p["concurrency"]): p for p in points_of(run) if p["sweep"] == "short_prompts"}
    # counted, not timed: on a busy machine tokens may arrive together, and then there is no TPOT
    assert (at["hf", 4].get("server_running_mean") or 0) <= 1 and "running_mean" not in at["hf", 4]
    assert at["vllm", 4]["running_mean"] > 1


def test_predictions_were_frozen_before_what_they_predict(finished):
    run, _ = finished
    frozen = json.loads((run / "predictions.json").read_text())["frozen"]
    assert [f["stage"] for f in frozen] == ["datasheet", "calibrated:hf", "calibrated:vllm"]
    assert not any(f["late"] for f in frozen)
    started = {
        e: min(p["started_at"] for p in points_of(run) if p["engine"] == e and p["sweep"] != "calibration")
        for e in ("hf", "vllm")
    }
    for f in frozen[1:]:
        assert f["time_utc"][:19] <= started[f["stage"].split(":")[1]][:19]


def test_the_engines_are_gone_and_their_facts_are_there(finished):
    run, _ = finished
    for name in ("hf", "vllm"):
        facts = json.loads((run / f"engines/{name}.json").read_text())
        assert facts["version"] and facts["startup_s"] > 0
        assert not Path(f"/proc/{facts['pid']}").exists()
    assert json.loads((run / "engines/vllm.json").read_text())["max_num_batched_tokens"] == 512


def test_report_and_lab_book_hold_every_chapter_and_make_no_request(finished):
    run, _ = finished
    report, book = (run / "report.html").read_text(), (run / "labbook.html").read_text()
    assert "What the prediction got wrong" in report and "What the prediction got wrong" not in book
    page = report + book
    assert not re.search(r"<(script|link|iframe|img)\b[^>]*\b(src|href)=[\"']?(https?:)?//", page)
    assert "<script" not in page
    for title in (
        "Preflight",
        "The frozen prediction",
        "Serving",
        "Concurrency, short prompts",
        "Concurrency, long prompts",
        "Prompt length",
        "Arrival rate",
        "Analysis",
        "What the prediction got wrong",
    ):
        assert title in page, title
    assert page.count("<svg") >= 15
    assert "Traceback" not in page and "ServebookError" not in page
    assert str(ROOT) not in page and str(run) not in page, "a path of this machine"
    assert "run time</dt><dd>0 s" not in page
    assert (run / "social.md").read_text().strip()


def test_a_second_run_measures_nothing_again_and_keeps_the_ink(finished):
    run, _ = finished
    before = {p: p.stat().st_mtime_ns for p in run.glob("requests/*/*/*")}
    ink = (run / "predictions.json").read_bytes()
    done = servebook("run", str(run.parent / "quick.yaml"), outputs=run.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "starting" not in done.stderr
    assert {p: p.stat().st_mtime_ns for p in run.glob("requests/*/*/*")} == before
    assert (run / "predictions.json").read_bytes() == ink


def test_a_packed_run_is_told_again_without_measuring(finished, tmp_path):
    run, _ = finished
    kept = tmp_path / "quick"
    assert servebook("pack", str(run), str(kept), outputs=tmp_path).returncode == 0
    assert sum(f.stat().st_size for f in kept.rglob("*") if f.is_file() and f.suffix != ".html") < 500_000
    (kept / "report.html").unlink()
    before = {p: p.read_bytes() for p in kept.rglob("*.json")}
    done = servebook("report", str(kept), outputs=tmp_path / "nowhere")
    assert done.returncode == 0, done.stderr[-2000:]
    assert {p: p.read_bytes() for p in before} == before and not (tmp_path / "nowhere").exists()

    def figures(page):  # the tables' cells, the machine-dependent boxes aside
        text = page.read_text()
        return re.findall(r"<td[^>]*>(.*?)</td>", text[: text.rindex("Run it again")])

    assert len(figures(kept / "report.html")) > 30 and figures(kept / "report.html") == figures(run / "report.html")
    assert (kept / "labbook.html").exists()


def test_rendering_again_gives_the_same_bytes(finished):
    run, _ = finished
    pages = set()
    for _ in range(2):
        done = servebook("report", str(run), outputs=run.parent)
        assert done.returncode == 0, done.stderr
        pages.add((run / "report.html").read_bytes())
    assert len(pages) == 1


@pytest.mark.parametrize("where", ["notebooks", "."])
def test_a_notebook_also_runs_by_hand_through_nbconvert(finished, tmp_path, where):
    run, _ = finished
    text = (
        (ROOT / "notebooks/07_analysis.ipynb").read_text().replace("params/demo.yaml", str(run.parent / "quick.yaml"))
    )
    (tmp_path / "07_analysis.ipynb").write_text(text)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "jupyter",
            "nbconvert",
            "--to",
            "notebook",
            "--execute",
            str(tmp_path / "07_analysis.ipynb"),
            "--output",
            "done.ipynb",
        ],
        cwd=ROOT / where,
        env={**os.environ, "SERVEBOOK_OUTPUTS": str(run.parent)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_engine_that_dies_at_start_costs_its_own_points_only(tmp_path):
    text = (ROOT / "params/demo.yaml").read_text()
    head, sweeps = text.split("sweeps:\n")
    small = "  short_prompts: {kind: concurrency, prompt_tokens: 64, output_tokens: 8, concurrency: [1, 2]}\n"
    text = head + "sweeps:\n" + small + sweeps[sweeps.index("\nslo:") :]
    text = text.replace("enforce_eager: true", "extra_args: [--no-such-flag]").replace("run: demo", "run: half")
    for old in ("requests: 8}", "requests: 5}"):
        text = text.replace(old, "requests: 2}")
    # none is about how long a point takes: on a busy machine a request of 1,024 tokens may take long
    for old in ("min_requests: 12", "max_requests: 40", "min_seconds: 2", "max_seconds: 8"):
        assert old in text
        text = text.replace(old, QUICK[old])
    (tmp_path / "half.yaml").write_text(text)
    done = servebook("run", str(tmp_path / "half.yaml"), outputs=tmp_path)
    assert done.returncode == 1
    fault = [line for line in done.stderr.splitlines() if line.startswith("servebook:")]
    assert len(fault) == 1 and "vllm" in fault[0] and "--no-such-flag" in fault[0], done.stderr
    points = points_of(tmp_path / "half")
    assert {p["engine"] for p in points} == {"hf"} and len(points) == 4
    page = (tmp_path / "half/report.html").read_text()
    assert "vllm did not run" in page and "--no-such-flag" in page


MIXTURE = """
run: mixture
title: A tiny mixture of experts, served twice
model: {config: tiny-qwen3-moe, weights: dummy, dtype: float32}
hardware: {gpu: detect}
engines:
  hf: {kind: naive, device: cpu}
  vllm: {kind: vllm, enforce_eager: true, max_model_len: 512, max_num_seqs: 4, max_num_batched_tokens: 256,
         cpu_kv_cache_gib: 0.25}
calibration:
  - {prompt_tokens: 64, output_tokens: 8, requests: 3}
sweeps:
  short_prompts: {kind: concurrency, prompt_tokens: 32, output_tokens: 8, concurrency: [2]}
load: {warmup_requests: 1, min_requests: 4, max_requests: 6, min_seconds: 0, max_seconds: 10}
"""


def test_a_mixture_of_experts_goes_through_the_book_with_both_engines(tmp_path):
    (tmp_path / "mixture.yaml").write_text(MIXTURE)
    done = servebook("run", str(tmp_path / "mixture.yaml"), outputs=tmp_path, timeout=1800)  # 100 s of CPU
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "mixture"
    points = points_of(run)
    assert {(p["sweep"], p["engine"]) for p in points} == {
        (s, e) for s in ("calibration", "short_prompts") for e in ("hf", "vllm")
    }
    assert all(p["requests"] > 0 for p in points)
    frozen = json.loads((run / "predictions.json").read_text())["frozen"]
    parts = frozen[0]["points"][0]["breakdown"]["tpot_s"]
    assert parts["experts_s"] > 0 and (run / "report.html").exists()
