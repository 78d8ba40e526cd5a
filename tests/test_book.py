"""A run's folder as the notebooks see it."""

import json
import time
from pathlib import Path

import pytest
from servebook import sessions
from servebook.book import Book

ROOT = Path(__file__).parents[1]


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    return Book.open(ROOT / "params/demo.yaml", create=True)


def measured(book, sweep, engine, point, started_at):
    path = book.dir / "requests" / sweep / engine / f"{point}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"sweep": sweep, "engine": engine, "point": point, "started_at": started_at, "wall_s": 60})
    )


def test_a_session_that_only_told_again_costs_nothing(book):
    records = [
        {"started_utc": "2026-01-01T10:00:00Z", "seconds": 3600.0},
        {"started_utc": "2026-01-02T10:00:00Z", "seconds": 1800.0},  # rendered again, a day later
        {"started_utc": "2026-01-03T10:00:00Z", "seconds": 1800.0},
    ]
    (book.dir / "provenance.json").write_text(json.dumps({"run": "demo", "sessions": records}))
    measured(book, "short_prompts", "hf", "c0001", "2026-01-01T10:05:00+00:00")
    measured(book, "short_prompts", "hf", "c0002", "2026-01-03T10:05:00+00:00")
    told = book.cost()
    assert told["wall_s"] == 5400.0
    assert told["cost"] == pytest.approx(1.5 * book.params.hardware.price_per_hour)
    assert told["measuring_s"] == 120.0 and told["overhead_s"] == 5280.0


def test_a_running_session_already_has_a_length_and_a_killed_one_leaves_it(book, monkeypatch):
    monkeypatch.setattr(sessions, "HEARTBEAT_S", 0.05)
    book.begin_session(["servebook", "run", "params/demo.yaml"])
    book.sessions.note(["a fault"])
    noted = book.provenance()["sessions"][-1]
    assert noted["seconds"] is not None
    time.sleep(0.4)
    later = book.provenance()["sessions"][-1]
    assert later["seconds"] > noted["seconds"] and later["faults"] == ["a fault"]
    book.sessions.end([])
    ended = book.provenance()["sessions"][-1]
    time.sleep(0.2)
    assert book.provenance()["sessions"][-1] == ended and ended["faults"] == []


def test_what_time_is_spent_on_is_noted_however_it_ends(book):
    with book.sessions.spending("starting", engine="vllm"):
        time.sleep(0.02)
    with pytest.raises(KeyboardInterrupt), book.sessions.spending("lost", engine="vllm", sweep="s", point="c0001"):
        raise KeyboardInterrupt
    with book.sessions.spending("lost", engine="vllm", sweep="s", point="c0001") as note:
        note["what"] = "measuring"
    starting, lost, measuring = book.sessions.spent()
    assert (starting["what"], starting["engine"]) == ("starting", "vllm") and 0.02 <= starting["seconds"] < 5
    assert lost["what"] == "lost" and measuring["what"] == "measuring" and measuring["point"] == "c0001"
    assert book.cost()["starting_s"] == starting["seconds"]


def test_shares_of_capacity_become_rates_once_a_prediction_is_frozen(book):
    assert book.specs("vllm", "arrival_rate") == []
    book.predict()
    rates = [s.rate_per_s for s in book.specs("vllm", "arrival_rate")]
    assert len(rates) == 2 and rates[1] == pytest.approx(2 * rates[0], rel=0.01)


def test_the_floor_of_a_point_is_its_roofline(book):
    (spec,) = [s for s in book.specs("vllm", "long_prompts") if s.concurrency == 1]
    floors = book.floors(spec)
    flops, bytes_per_s = book.gpu.flops_per_s(book.shape.compute_dtype), book.gpu.bytes_per_s
    assert floors["ttft_floor_s"] >= book.shape.prefill_flops(1024) / flops
    assert floors["tpot_floor_s"] >= book.shape.decode_weight_bytes / bytes_per_s
