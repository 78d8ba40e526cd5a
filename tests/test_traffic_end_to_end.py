"""The shipped run of every kind of traffic, once, with the real vLLM on this machine's CPU, into its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servebook.config import params, request_plan

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run's folder."""
    folder = tmp_path_factory.mktemp("traffic")
    done = subprocess.run(
        [sys.executable, "-m", "servebook.cli", "run", "params/traffic-demo.yaml"],
        cwd=ROOT, env={**os.environ, "SERVEBOOK_OUTPUTS": str(folder)}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "traffic-demo"


def points_of(run):
    return {(p["sweep"], p["point"]): p for f in run.glob("requests/*/*/*.json") if (p := json.loads(f.read_text()))}


def rows_of(run, sweep, point):
    return [json.loads(line) for line in (run / "requests" / sweep / "vllm" / f"{point}.jsonl").open()]


def test_every_load_was_sent_as_it_was_predicted(run):
    p, found = params.read_file(run / "params.yaml"), points_of(run)
    for sweep in p.sweeps:
        for spec in p.sweep_points(sweep, "vllm"):
            point, rows = found[sweep, spec.point], rows_of(run, sweep, spec.point)
            plan = request_plan.of_point(spec, p.load)
            assert plan is not None and point["failures"] == 0 and point["requests"] > 0, (sweep, spec.point)
            if spec.requests is not None:
                sent = sorted(r["i"] for r in rows)
                assert len(set(sent)) == len(sent) == spec.requests, sweep
                # whoever ends a conversation first begins the next: which request is the last one depends on time
                assert plan.has_conversations or sent == list(range(spec.requests)), sweep
            for r in rows:
                if r["ok"]:
                    asked = plan[r["i"] % len(plan)]
                    assert (r["prompt_tokens"], r["output_tokens"]) == (asked.prompt_tokens, asked.output_tokens)
    # what prompts share was found in vLLM's own cache: of six prompts only the first round is new
    assert found["rates", "r4.000"]["cache_hit_share"] > 0.5 and found["talks", "c0002"]["cache_hit_share"] > 0.2


def test_distributions_were_frozen_and_the_page_shows_them(run):
    frozen = json.loads((run / "predictions.json").read_text())["frozen"][-1]["points"]
    replay = next(p for p in frozen if p["sweep"] == "replay")
    assert replay["percentiles"]["ttft_s"]["p99"]["low"] < replay["percentiles"]["ttft_s"]["p99"]["high"]
    assert replay["hit_share"] > 0 and len(replay["series"]["t_s"]) == 100
    page, book = (run / "report.html").read_text(), (run / "labbook.html").read_text()
    for text in ("How latencies spread over requests", "The run over time", "Distributions, predicted and measured"):
        assert text in page and text in book, text
    assert "Median |error|" in page  # the scores of the distributions
    assert (run / "traces" / "recorded.jsonl").read_text() == (ROOT / "params/traces/mixed.jsonl").read_text()
