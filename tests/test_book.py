"""A run's folder as the notebooks see it."""

import json
import time
from pathlib import Path

import pytest
from servebook.common.measured_point import MeasuredPoint
from servebook.common.reasons import Reason, ReasonCode
from servebook.predictor import predict
from servebook.report import tables
from servebook.run.book import Book
from servebook.run_folder import results, sessions

ROOT = Path(__file__).parents[1]


@pytest.fixture
def book(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    return Book.open(ROOT / "params/demo.yaml", create=True)


LENGTHS = {"prompt_tokens": 512, "output_tokens": 128}


def measured(book, sweep, engine, point, started_at):
    path = book.dir / "requests" / sweep / engine / f"{point}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"sweep": sweep, "engine": engine, "point": point, "started_at": started_at, "wall_s": 60} | LENGTHS)
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
    later = noted
    for _ in range(600):  # the heartbeat comes when the machine gets to it
        if later["seconds"] > noted["seconds"]:
            break
        time.sleep(0.05)
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
    assert (starting["what"], starting["engine"]) == ("starting", "vllm") and starting["seconds"] > 0
    assert lost["what"] == "lost" and measuring["what"] == "measuring" and measuring["point"] == "c0001"
    assert book.cost()["starting_s"] == starting["seconds"]


def test_shares_of_capacity_become_rates_once_a_prediction_is_frozen(book):
    assert book.specs("vllm", "arrival_rate") == []
    book.predict()
    rates = [s.rate_per_s for s in book.specs("vllm", "arrival_rate")]
    assert len(rates) == 2 and rates[1] == pytest.approx(2 * rates[0], rel=0.01)


def test_what_would_be_predicted_from_the_same_inputs_is_not_simulated_again(book, monkeypatch):
    first = book.predict()
    simulated = []
    monkeypatch.setattr(predict, "predict_run", lambda *a, **k: simulated.append(k) or pytest.fail("simulated"))
    assert book.predict() == first == book.frozen("datasheet")
    load = book.params.load.model_copy(update={"min_requests": book.params.load.min_requests + 1})
    book.params = book.params.model_copy(update={"load": load})
    with pytest.raises(pytest.fail.Exception, match="simulated"):
        book.predict()
    assert len(simulated) == 1


def test_no_floor_on_a_cpu_whose_rates_are_estimates(book):
    assert [book.floors(s) for s in book.specs("vllm", "long_prompts")] == [{}] * len(
        book.specs("vllm", "long_prompts")
    )


def test_points_that_are_not_learned_from_are_told(book, monkeypatch):
    told = []
    floor = Reason(ReasonCode.BELOW_FLOOR, "mean TPOT 11.3 ms is below its physical floor 13.4 ms")
    learned = MeasuredPoint(
        sweep="calibration", engine="vllm", point_id="p00064-o0008", verdict="invalid", reasons=(floor,), concurrency=1,
        prompt_tokens=64, output_tokens=8, ttft_mean_s=0.1, tpot_mean_s=0.01,
    )  # fmt: skip
    monkeypatch.setattr(type(book), "stored_points", lambda self: [learned])
    monkeypatch.setattr(type(book), "tell", lambda self, text, aloud: told.append((text, aloud)))
    entry = book.predict("vllm")
    (note, aloud), *_ = told
    assert aloud and "1 of 1 C = 1 points are invalid and not learned from" in note and "below its physical" in note
    assert entry["constants"]["vllm"]["notes"][0] in note  # the page shows it from there


def test_points_that_the_parameters_dropped_are_left_out_until_they_are_back(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    text = (ROOT / "params/demo.yaml").read_text()

    def opened(old="", new=""):
        assert old in text
        (tmp_path / "demo.yaml").write_text(text.replace(old, new))
        return Book.open(tmp_path / "demo.yaml", create=True)

    def points(book):
        return sorted(p.key for p in book.stored_points())

    book = opened()
    book.predict()
    rate = book.specs("vllm", "arrival_rate")[0].point
    there = [
        ("arrival_rate", "vllm", rate),
        ("prompt_length", "vllm", "p01024"),
        ("prompt_length", "vllm", "p00064"),
        ("short_prompts", "hf", "c0001"),
        ("short_prompts", "vllm", "c0008"),
    ]
    for at in there:
        measured(book, *at, "2026-01-01T10:05:00+00:00")
    stops = book.dir / "stops/prompt_length.vllm.p01024.json"
    stops.parent.mkdir()
    stops.write_text(
        json.dumps(
            {
                "sweep": "prompt_length",
                "engine": "vllm",
                "points": ["p01024"],
                "fault": True,
                "why": "p01024 was not measured: x",
            }
        )
    )
    [stop] = book.stopped()
    assert book.left_out() is None and (stop["loads"], stop["why"]) == ("1,024 prompt tokens", "x")
    unfinished = dict(line.split(": ") for line in book.unfinished())
    assert unfinished["prompt_length, vllm"] == "256, 512 prompt tokens not measured when the run ended"
    assert unfinished["short_prompts, vllm"] == "C = 1, 2, 4 not measured when the run ended"
    assert "arrival_rate, vllm" in unfinished
    book = opened("prompt_tokens: [64, 256, 512, 1024]", "prompt_tokens: [64]")
    assert points(book) == sorted(set(there) - {there[1]}) and book.stopped() == []
    assert book.left_out() == "1 stored point is of other parameters and left out"
    predicted = [p for e in book.predictions()["frozen"] for p in e["points"] if p["sweep"] == "prompt_length"]
    assert {p["point"] for p in predicted} == {"p00064"} and len(book._all_predictions()["frozen"][0]["points"]) > len(
        predicted
    )
    assert [f.name for f in (book.dir / "requests/prompt_length/vllm").iterdir() if f.name.endswith(".json")] == [
        "p00064.json"
    ], "nothing else that reads the folder sees it either"
    book = opened()
    assert points(book) == sorted(there) and book.left_out() is None and len(book.stopped()) == 1
    (book.dir / "predictions.json").unlink()  # shares of a capacity that nobody knows: what is stored stays
    book.point_status.sync_with_params()
    assert points(book) == sorted(there)


def measured_of(spec):
    return MeasuredPoint(
        sweep=spec.sweep, engine=spec.engine, point_id=spec.point, prompt_tokens=spec.prompt_tokens,
        output_tokens=spec.output_tokens,
    )  # fmt: skip


def test_a_parameter_that_a_later_version_adds_makes_no_point_another(book, monkeypatch):
    (spec, *_) = book.specs("vllm", "short_prompts")
    assert book.point_status.start(spec) is None
    book.point_status.complete(spec, measured_of(spec))
    made_with = book.files.made_with
    now = json.loads(made_with.read_text())

    def stored(part, **changes):
        """As an earlier version would have written it: without a key (None), or with another value."""
        ((fingerprint, made),) = now.items()
        made = {**made, part: {k: v for k, v in {**made[part], **changes}.items() if v is not None}}
        made_with.write_text(json.dumps({fingerprint: made}))
        monkeypatch.setattr(book.point_status, "fingerprint", lambda _: "of another version")

    stored("load", jitter_s=None)
    assert book.params.load.jitter_s != 0.05 and not book.point_status.kept(spec), "it is given, and not its default"
    stored("load", temperature=None)
    assert book.point_status.kept(spec), "it has its default, as it had before it was a parameter"
    stored("load", temperature=0.5)
    assert not book.point_status.kept(spec)
    stored("engine", max_num_seqs=8)
    assert not book.point_status.kept(spec)
    stored("facts", version="another")
    assert not book.point_status.kept(spec)
    book.point_status.sync_with_params()
    assert book.stored_points(), "another server is no other parameter"
    stored("engine", max_num_seqs=8)
    book.point_status.sync_with_params()
    assert not book.stored_points() and book.left_out()


def test_points_that_contradict_each_other_cost_the_calibration_and_not_the_run(book, capsys):
    book.predict()
    for point, prompt, tpot_s in (("p00128-o0032", 128, 0.0070), ("p01024-o0032", 1024, 0.0022)):
        results.write_point(book.dir, MeasuredPoint(
            sweep="calibration", engine="vllm", point_id=point, concurrency=1, prompt_tokens=prompt, output_tokens=32,
            ttft_mean_s=0.02, tpot_mean_s=tpot_s, verdict="suspect", requests=5, failures=0,
        ))  # fmt: skip
    entry = book.predict("vllm")
    assert "contradict each other" in entry["constants"]["vllm"]["notes"][0]
    assert "contradict each other" in capsys.readouterr().out
    assert all(p["metrics"]["tpot_s"]["value"] > 0 for p in entry["points"])
    assert "contradict each other" in tables.constants([entry])
