"""One injected fault a test: what the server does wrong is seen, counted and said, and never ends in a hang."""

from __future__ import annotations

import asyncio
import functools
import resource
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from mock_server import Behaviour, serving
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config.params import Load, Slo
from servebook.load import PointSpec, measure_point_sync
from servebook.load.window import Rule
from servebook.run_folder import results

TOKENS = 16


def measure(
    behaviour: Behaviour, *, c: int = 2, n: int = 8, limit_s: float = 60.0, run_dir: Path | None = None, **load: Any
) -> MeasuredPoint:
    spec = PointSpec("s", "mock", f"c{c:04d}", "concurrency", 32, TOKENS, concurrency=c)
    with serving(behaviour) as server:
        return measure_point_sync(
            spec, url=server.url, model="mock", vocab=range(100, 1000), load=Load(jitter_s=0.001, **load),
            slo=Slo(), run_dir=run_dir, batching=True, rule=Rule(2, n, n, 0.0, limit_s),
        )  # fmt: skip


def agrees(point: MeasuredPoint, run_dir: Path, *, later_tokens: int, gaps: int | None = None) -> None:
    """TPOT is the time from the first token's event to the last's over the tokens after the first event, and so many
    gaps lie between; by the request's own time stamps, as a busy machine stretches them."""
    rows = results.read_rows(results.rows_path(run_dir, "s", "mock", point.point_id))
    measured = [r for r in rows if r["phase"] == "measured"]
    assert len(measured) == point.requests
    seen = [r for r in measured if r["gaps_ms"]]  # of the others a stalled client has read all events at once
    assert seen and all(r["tpot_s"] is None for r in measured if r not in seen)
    for r in seen:
        assert r["tpot_s"] == pytest.approx((r["last_s"] - r["first_s"]) / later_tokens, abs=2e-6)
        assert gaps is None or len(r["gaps_ms"]) <= gaps
        assert sum(r["gaps_ms"]) == pytest.approx(1e3 * (r["last_s"] - r["first_s"]), abs=0.2)
    assert point.tpot_mean_s == pytest.approx(np.mean([r["tpot_s"] for r in seen]), abs=2e-6)


def test_several_tokens_an_event_give_the_right_tpot_and_an_event_gap(tmp_path: Path) -> None:
    p = measure(Behaviour(tokens_per_event=4, itl_s=0.01), run_dir=tmp_path)
    assert p.tokens_per_event == 4 and p.itl_is_event_gap and p.first_event_unknown == 0
    # 4 events, 3 gaps, for the 12 tokens after the first event
    agrees(p, tmp_path, later_tokens=12, gaps=3)


def test_tokens_of_an_event_without_running_usage_are_counted_by_ids_or_reported_as_assumed(tmp_path: Path) -> None:
    by_ids = Behaviour(tokens_per_event=4, itl_s=0.01, running_usage=False, token_ids=True)
    counted = measure(by_ids, run_dir=tmp_path)
    agrees(counted, tmp_path, later_tokens=12)
    assert counted.first_event_unknown == 0
    assumed = measure(Behaviour(tokens_per_event=4, itl_s=0.01, running_usage=False))
    assert assumed.first_event_unknown == 8 and any("one is assumed" in r for r in map(str, assumed.reasons))


def test_a_first_event_of_several_tokens_is_taken_out_of_the_tpot(tmp_path: Path) -> None:
    p = measure(Behaviour(first_event_tokens=6, itl_s=0.005), run_dir=tmp_path)
    assert p.first_event_unknown == 0 and p.itl_is_event_gap
    agrees(p, tmp_path, later_tokens=10)
    assert p.output_tokens_off == 0


def test_a_finish_event_without_a_token_is_none(tmp_path: Path) -> None:
    p = measure(Behaviour(empty_finish=True, running_usage=False, itl_s=0.01), run_dir=tmp_path)
    assert (p.requests, p.tokens_per_event, p.events_over_tokens) == (8, 1, 0)
    agrees(p, tmp_path, later_tokens=15, gaps=15)


def test_several_events_in_one_read_are_counted_as_several_and_no_gap_is_zero(tmp_path: Path) -> None:
    p = measure(Behaviour(events_per_write=4, itl_s=0.01), run_dir=tmp_path)
    assert p.tokens_per_event == 1 and p.itl_is_event_gap and p.output_tokens_off == 0
    agrees(p, tmp_path, later_tokens=15, gaps=3)


def test_events_split_inside_json_over_crlf_with_comments() -> None:
    p = measure(Behaviour(split_bytes=23, crlf=True, comments=True, itl_s=0.02), n=4)
    assert (p.requests, p.failures, p.tokens_per_event) == (4, 0, 1)


def test_an_empty_first_event_is_no_token() -> None:
    p = measure(Behaviour(leading_events=1, ttft_s=0.05, running_usage=False))
    assert p.ttft_p50_s >= 0.045 and p.events_over_tokens == 0


def test_tokens_with_empty_text_are_tokens() -> None:
    for running in (True, False):
        p = measure(Behaviour(empty_text=True, running_usage=running))
        assert (p.requests, p.tokens_per_event) == (8, 1)


def test_no_usage_is_a_failure_that_says_so() -> None:
    p = measure(Behaviour(usage=False, running_usage=False))
    assert p.verdict == "invalid" and "no usage" in p.reasons[0].text


def test_an_error_status_is_counted_with_its_message_and_stays_out_of_the_percentiles() -> None:
    p = measure(Behaviour(fail_every=4, ttft_s=0.05), n=16)
    assert p.failures in (4, 5) and p.requests == 16 - p.failures
    assert p.errors == {"HTTP 500: out of order": p.failures + p.warmup_failures}
    assert p.ttft_min_s >= 0.045  # an error answers at once
    assert p.goodput_share == p.requests / 16 and p.verdict == "invalid"


def test_a_server_that_refuses_everything_ends_the_point_early() -> None:
    p = measure(Behaviour(fail_every=1), limit_s=60)
    assert "HTTP 500" in p.stop_reason and p.requests == 0 and p.verdict == "invalid"


def test_no_server_is_one_clear_error() -> None:
    with serving() as server:
        url = server.url
    spec = PointSpec("s", "mock", "c0001", "concurrency", 32, TOKENS, concurrency=1)
    with pytest.raises(ServebookError, match="no server answers"):
        measure_point_sync(
            spec, url=url, model="mock", vocab=range(100), load=Load(), slo=Slo(), run_dir=None, batching=True
        )


def test_a_request_the_server_refuses_raises_its_message() -> None:
    with pytest.raises(ServebookError, match="unknown field max_tokens"):
        measure(Behaviour(refuse_fields=("max_tokens",)))


def test_a_model_the_server_does_not_know_is_one_clear_error() -> None:
    with pytest.raises(ServebookError, match="HTTP 404: out of order"):
        measure(Behaviour(fail_every=1, status=404))


@pytest.mark.parametrize("field", ["continuous_usage_stats", "ignore_eos"])
def test_a_field_the_server_does_not_know_is_left_out(field: str) -> None:
    assert measure(Behaviour(refuse_fields=(field,))).requests == 8


def test_what_a_server_takes_is_asked_before_every_point() -> None:
    spec = PointSpec("s", "mock", "c0001", "concurrency", 32, TOKENS, concurrency=1)
    with serving(Behaviour(fail_every=1)) as server:
        measure = functools.partial(
            measure_point_sync, spec, url=server.url, model="mock", vocab=range(100, 1000), load=Load(jitter_s=0.001),
            slo=Slo(), run_dir=None, batching=True, rule=Rule(2, 4, 4, 0.0, 20.0),
        )  # fmt: skip
        assert measure().requests == 0
        server.b.fail_every, server.b.refuse_fields = 0, ("continuous_usage_stats",)  # or another in its place
        assert measure().requests == 4


def test_more_connections_than_files_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ServebookError, match="500 connections at once, where this process may open 256 files"):
        measure(Behaviour(), c=500)
    assert measure(Behaviour(), c=2).requests == 8


def test_a_cut_mid_stream_is_a_failure() -> None:
    p = measure(Behaviour(cut_after=5))
    assert p.requests == 0 and "connection cut mid-stream" in p.errors


def test_a_server_that_goes_away_ends_the_point_and_is_named() -> None:
    p = measure(Behaviour(refuse_from=6), n=400, limit_s=60)
    assert "requests in a row failed: " in p.stop_reason
    assert p.verdict == "invalid" and any("onnect" in e for e in p.errors)


def test_a_stream_that_ends_without_its_end_mark_is_a_failure() -> None:
    p = measure(Behaviour(silent_close_after=5))
    assert p.requests == 0 and "the stream ended without [DONE]" in p.errors


def test_an_error_object_inside_a_200_stream_is_a_failure() -> None:
    p = measure(Behaviour(error_after=5))
    assert p.requests == 0 and "error in the stream: engine died" in p.errors


def test_a_stall_ends_with_the_requests_timeout() -> None:
    p = measure(Behaviour(stall_after=5), request_timeout_s=0.3)
    assert p.requests == 0 and "timed out after 0.3 s" in p.errors


def test_a_server_that_stops_answering_cannot_hold_the_point_up_and_is_reported() -> None:
    p = measure(Behaviour(hang_from=7), limit_s=4)
    assert p.stop_reason == "time limit reached" and p.hung == 2
    assert p.verdict != "valid" and any("hung" in r for r in map(str, p.reasons))


def test_a_server_that_never_answers_is_one_clear_error() -> None:
    with pytest.raises(ServebookError, match="no answer within 1 s"):
        measure(Behaviour(hang_from=1), limit_s=1)


def test_an_answer_without_a_token_is_a_failure() -> None:
    p = measure(Behaviour(no_tokens=True))
    assert p.requests == 0 and "answered with no token" in p.errors


def test_slow_headers_are_part_of_the_latency() -> None:
    assert measure(Behaviour(slow_headers_s=0.05)).ttft_p50_s >= 0.045


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour(usage_off_by=-3, running_usage=False), "answers were not as long as asked"),
        (Behaviour(usage_off_by=-3, running_usage=False), "more token events than tokens"),
        (Behaviour(prompt_off_by=1), "prompts were not as long as asked"),
        (Behaviour(short_by=4), "answers were not as long as asked"),
        (Behaviour(cached_share=0.5), "prefix cache unintentionally"),
        (Behaviour(counter_off=2.0), "the server counted"),
        (Behaviour(preemptions=1), "preemptions: the KV cache overflowed"),
    ],
)
def test_what_disagrees_is_a_reason(behaviour: Behaviour, reason: str) -> None:
    p = measure(behaviour, n=32)
    assert p.verdict != "valid" and any(reason in r for r in map(str, p.reasons))


def test_nothing_wrong_is_valid() -> None:
    p = measure(Behaviour(ttft_s=0.03, itl_s=0.01), n=16)
    machine = ("client-limited", "not converged", "not steady", "Little's law")  # a busy one does that
    assert [r for r in map(str, p.reasons) if not r.startswith(machine)] == []


def test_bodies_are_read_alike_without_aiohttps_inner_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from servebook.load import connections

    ordinary = functools.partial(functools.partial, connections.ResponseHandler)
    monkeypatch.setattr(connections, "partial", lambda _, loop: ordinary(loop=loop))
    p = measure(Behaviour(split_bytes=23, itl_s=0.02), n=4)
    assert (p.requests, p.tokens_per_event) == (4, 1)


def test_the_hook_is_there_in_this_aiohttp() -> None:
    async def hook() -> bool:
        return hasattr(aiohttp.TCPConnector(), "_factory")

    assert asyncio.run(hook())
