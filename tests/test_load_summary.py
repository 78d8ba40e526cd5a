"""A point's figures: the same as of the requests themselves, whatever is kept of them and wherever."""

from __future__ import annotations

import gzip
import json
import math
import random
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servebook.common import stats
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config import params
from servebook.config.params import Slo
from servebook.load import finished
from servebook.load.client import Reply
from servebook.load.flow import SLICES
from servebook.load.stream import TokenStream
from servebook.load.summary import summarize
from servebook.load.window import PointProgress, Rule
from servebook.run_folder import results

EARLIER = Path(__file__).parents[1] / "outputs/reference/earlier.tar.xz"
DATA = Path(__file__).parent / "data/h200"
KEPT = (
    "requests", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "ttft_ci_low_s", "ttft_ci_high_s",
    "tpot_mean_s", "tpot_p50_s", "tpot_p99_s", "tpot_ci_low_s", "tpot_ci_high_s", "e2e_mean_s", "e2e_p50_s",
    "e2e_p99_s", "ttft_p99_ci_low_s", "ttft_p99_ci_high_s", "ttft_min_s", "tpot_min_s", "goodput_per_s",
    "request_rate_per_s", "in_flight_mean", "little_error", "tokens_per_event",
)  # fmt: skip


POINT = MeasuredPoint(sweep="s", engine="e", point_id="p", prompt_tokens=64, output_tokens=64)


def tracker(begin: float, end: float, concurrency: int | None, *, open_loop: bool = False) -> PointProgress:
    t = PointProgress(Rule(1, 1, 1, 0.0, 1e9), 0.0, concurrency, lambda _: None, open_loop)
    t.window_start, t.window_end, t.stopped_at = begin, end, end
    return t


def reply_of(row: dict[str, Any]) -> Reply:
    stream = TokenStream()
    reads = len(row["gaps_ms"]) + 1
    if row["first_s"] is not None:
        stream.times = list(row["first_s"] + np.cumsum([0.0, *row["gaps_ms"]]) / 1e3)
        stream.times[-1] = row["last_s"]  # gaps are rounded to 0.01 ms
        stream.counts = [1] * (reads - 1) + [row["events"] - reads + 1]
    stream.tokens, stream.prompt_tokens = row["output_tokens"], row["prompt_tokens"]
    stream.first_tokens = row["first_event_tokens"]
    times = {k: row[f"{k}_s"] for k in ("scheduled", "sent", "end")}
    asked = row["prompt_tokens_asked"], row["output_tokens_asked"]
    return Reply(row["i"], *asked, **times, error=row["error"], phase=row["phase"], stream=stream)


@pytest.mark.parametrize(
    "name",
    ["long_prompts/vllm/c0016", "long_prompts/hf/c0004"],
)
def test_a_kept_runs_published_figures_follow_from_its_rows(name: str, tmp_path: Path) -> None:
    with tarfile.open(EARLIER) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "h200-qwen2.5-7b"
    sweep, engine, point = name.split("/")
    published = results.read_point(run, sweep, engine, point)
    packed = (DATA / f"{sweep}.{engine}.{point}.jsonl.gz").read_bytes()  # with every gap, unlike a kept run
    rows = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert published is not None
    opened = max(i for i, row in enumerate(rows) if row["phase"] == "warmup")
    begin = rows[opened]["end_s"]
    end = begin + published.seconds + 1.5e-6  # a request ended with the window: rows are rounded to 1 µs
    t = tracker(begin, end, published.concurrency)
    for row in rows:
        t.finished.add(reply_of(row))
    slo = params.read_file(run / "params.yaml").slo
    found = summarize(POINT, t, slo, batching=engine == "vllm", scraper=None).to_json()
    for key in KEPT:
        wanted = getattr(published, key) and pytest.approx(getattr(published, key), rel=1e-4, abs=2e-6)
        assert found[key] == wanted, key
    for key in ("itl_p50_s", "itl_p99_s"):  # of gaps that the rows have to 0.01 ms
        assert found[key] == pytest.approx(getattr(published, key), rel=1 / 4096, abs=6e-6), key
    assert found["output_tok_per_s"] == pytest.approx(published.output_tok_per_s, rel=2e-3)


def made_up(rng: random.Random, index: int, begun: float) -> Reply:
    """An answer of several tokens an event and events a read; some fail, some tell less than others."""
    reads = rng.randint(1, 30)
    stream = TokenStream()
    stream.times = [begun + 0.1 + 0.01 * k + rng.uniform(0, 0.009) for k in range(reads)]
    stream.counts = [rng.choice((1, 1, 1, 3)) for _ in range(reads)]
    stream.first_tokens = rng.choice((None, 1, 2))
    stream.tokens, stream.prompt_tokens = stream.events + rng.choice((2, 2, 9)), rng.choice((None, 64))
    reply = Reply(index, 64, stream.tokens, sent=begun, end=stream.times[-1] + 0.001, stream=stream)
    if rng.random() < 0.05:
        reply.error = "cut"
    return reply


@pytest.mark.parametrize("open_loop", [False, True])
def test_figures_are_those_of_the_requests_themselves(open_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finished, "IN_MEMORY", 5000)  # so that most of it lies in files
    rng = random.Random(7)
    replies = [made_up(rng, i, 0.02 * i) for i in range(1500)]
    begin, end = replies[150].end or 0.0, replies[1399].end or 0.0
    t = tracker(begin, end, None if open_loop else 16, open_loop=open_loop)
    for i, r in enumerate(replies):
        r.scheduled = (r.sent or 0.0) - rng.uniform(0, 0.002) if open_loop else None
        r.phase = "warmup" if i < 151 else "measured" if i < 1400 else "drain"
        t.finished.add(r)
    carried = [made_up(rng, 2000 + i, 29.5) for i in range(5)]
    for r in carried:
        t.finished.add(r, "carried")
    slo = Slo(ttft_s=0.105, tpot_s=0.008)
    p = summarize(POINT, t, slo, batching=True, scraper=None).to_json()

    good = [r for r in replies if r.phase == "measured" and r.ok]
    lists = {k: [v for r in good if (v := getattr(r, f"{k}_s")) is not None] for k in ("ttft", "tpot", "e2e")}
    gaps = [b - a for r in good for a, b in pairwise(r.stream.times)]
    assert (p["requests"], p["requests"] + p["failures"]) == (len(good), 1249)
    assert p["errors"] == {"cut": sum(r.error is not None for r in replies if r.phase != "drain")}
    for k, values in lists.items():
        interval = stats.mean_interval(values, t.per_round)
        assert p[f"{k}_mean_s"] == pytest.approx(np.mean(values), rel=1e-12)
        assert p[f"{k}_p99_s"] == pytest.approx(np.percentile(values, 99), rel=1e-12)
        assert (p[f"{k}_ci_low_s"], p[f"{k}_ci_high_s"]) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert (p["ttft_p99_ci_low_s"], p["ttft_p99_ci_high_s"]) == stats.percentile_interval(lists["ttft"], 99)
    assert p["ttft_drift"] == stats.drift(lists["ttft"], t.per_round)
    assert p["itl_p99_s"] == pytest.approx(np.percentile(gaps, 99), rel=1 / 4096)
    met = [r for r in good if r.ttft_s <= 0.105 and (r.tpot_s is None or r.tpot_s <= 0.008)]
    assert 0 < len(met) < len(good) and p["goodput_share"] == len(met) / 1249

    tokens: list[tuple[float, float]] = []
    for r in (*replies, *carried):  # the first event what it told, the others the rest in equal shares
        opening, events = r.stream.first_tokens or 1, r.stream.events
        each = (r.stream.tokens - opening) / (events - 1) if events > 1 else 0.0
        for k, (at, count) in enumerate(zip(r.stream.times, r.stream.counts, strict=True)):
            tokens.append((at, opening + (count - 1) * each if not k else count * each))

    def rate(a: float, b: float) -> float:
        return sum(n for at, n in tokens if a < at <= b) / (b - a)

    assert p["output_tok_per_s"] == pytest.approx(rate(begin, end), rel=1e-9)
    slices = stats.mean_interval([rate(a, b) for a, b in pairwise(np.linspace(begin, end, SLICES + 1))])
    assert p["output_tok_per_s_ci_low"] == pytest.approx(slices.low, rel=1e-9)
    everything = [*replies, *carried]
    firsts = sum(begin < r.first <= end for r in everything)
    prompts = sum((r.stream.prompt_tokens or 64) for r in everything if begin < r.first <= end)
    assert p["decode_wall_tok_per_s"] == pytest.approx(rate(begin, end) - firsts / (end - begin), rel=1e-9)
    spans = sorted((max(r.first, begin), min(r.last, end)) for r in everything if r.first < end and r.last > begin)
    moments = np.linspace(begin, end, 20001)
    beside = sum((a <= moments) & (moments < b) for a, b in spans)
    decoding = min(p["in_flight_mean"], beside.sum() / (beside > 0).sum())
    assert p["decode_tok_per_s"] == pytest.approx(
        max(decoding / p["tpot_mean_s"], p["decode_wall_tok_per_s"]), rel=2e-3
    )
    assert p["total_tok_per_s"] == pytest.approx(rate(begin, end) + prompts / (end - begin), rel=1e-9)
    presence = sum(max(0.0, min(r.end, end) - max(r.sent, begin)) for r in everything)
    assert p["in_flight_mean"] == pytest.approx(presence / (end - begin), rel=1e-9)
    if open_loop:
        lags = [r.sent - r.scheduled for r in replies]
        assert p["schedule_lag_p99_s"] == pytest.approx(np.percentile(lags, 99), rel=1e-9)
        assert p["arrival_rate_per_s"] == sum(begin < r.scheduled <= end for r in replies) / (end - begin)


def test_memory_does_not_grow_with_the_requests() -> None:
    """What is kept in memory of a finished request: 8 bytes for the rule; all else is on disk beyond a megabyte."""
    import tracemalloc

    t = tracker(0.0, math.inf, 1)
    rng = random.Random(1)
    some = [made_up(rng, i, 0.0) for i in range(50)]
    held = []
    tracemalloc.start()
    try:
        for round_ in range(1200):
            for r in some:
                r.phase = "drain"
                t.done(r)
            if round_ in (600, 1199):
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] < 16 * 600 * len(some)  # the whole of one is over 1,000 bytes


def test_a_request_that_cannot_be_kept_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    t = tracker(0.0, 1.0, 1)
    monkeypatch.setattr(t.finished._times, "_file", Full())
    t.done(made_up(random.Random(1), 0, 0.0))
    assert isinstance(t.fault, ServebookError) and "No space left" in str(t.fault)


def test_error_texts_that_never_repeat_do_not_pile_up() -> None:
    kept = finished.RequestLog()
    for i in range(3000):
        kept.add(Reply(i, 1, 1, error=f"request {i} refused", phase="measured"))
    assert len(kept.errors) == 1001 and kept.errors[finished.OTHER_ERRORS] == 2000
