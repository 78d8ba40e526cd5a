"""Workloads in the parameters: the exact requests that follow from them, the same for the client and the predictor."""

from __future__ import annotations

import numpy as np
import pytest
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config import params, request_plan
from servebook.config.points import PointSpec
from servebook.config.workloads import Workload
from servebook.run.book import Book
from servebook.run_folder import results
from servebook.run_folder.pack import pack

HEAD = """
run: w
title: w
model: {config: qwen2.5-7b, weights: dummy}
hardware: {gpu: H200}
engines: {vllm: {kind: vllm}}
"""
CHAT = 'workloads: {chat: {prompt_tokens: "800:1000", output_tokens: "lognormal:250,80,1,1024"}}\n'
STEPS = "sweeps: {steps: {kind: concurrency, workload: chat, concurrency: [1, 8]}}\n"


def plan(seed=1, **given):
    return request_plan.RequestPlan(Workload(**given), seed, "name")


def test_lengths_follow_from_the_seed_alone():
    given = {"prompt_tokens": "800:1000", "output_tokens": "lognormal:250,80,1,1024"}
    first, again, other = plan(**given), plan(**given), plan(seed=2, **given)
    assert [first[i] for i in range(50)] == [again[i] for i in (range(50))]
    assert [first[i] for i in range(50)] != [other[i] for i in range(50)]
    prompts = [first[i].prompt_tokens for i in range(2000)]
    assert min(prompts) >= 800 and max(prompts) <= 1000 and abs(np.mean(prompts) - 900) < 5
    assert abs(np.mean([first[i].output_tokens for i in range(2000)]) - 250) < 6
    assert Workload(**given).mean_tokens() == (900, pytest.approx(250, abs=6))


def test_prompts_of_a_group_share_their_prefix_and_few_prompts_repeat():
    p = plan(prompt_tokens="400:500", output_tokens=248, shared_prefix={"tokens": 100, "groups": 9}, unique_prompts=45)
    assert p[0] == p[45] and p[0].prompt_tokens != p[1].prompt_tokens
    assert sum(n for _, n in p[3].shared) == p[3].prompt_tokens  # all of it is known elsewhere
    prefixes = {p[i].shared[0] for i in range(45)}
    assert len(prefixes) == 9 and {n for _, n in prefixes} == {100}
    assert p[0].shared[0] == p[9].shared[0] and p[0].shared[1] != p[9].shared[1]


def test_a_turn_has_all_that_was_said_before_in_its_prompt():
    p = plan(prompt_tokens=200, output_tokens=150, turns=4)
    assert [p[i].prompt_tokens for i in range(5)] == [200, 550, 900, 1250, 200]
    assert [p[i].conversation for i in range(5)] == [0, 0, 0, 0, 1]
    assert [p[i].last_turn for i in range(4)] == [False, False, False, True]
    assert [p.follows(i) for i in range(4)] == [1, 2, 3, None] and p.begins(1) == 4
    assert Workload(prompt_tokens=200, output_tokens=150, turns=4).mean_tokens() == (725, 150)
    assert Workload(prompt_tokens=200, output_tokens=150, turns=4).longest_tokens() == (1250, 150)


def test_every_kind_of_load_has_its_points(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1,10,5\n2,20,5\n")
    text = (
        HEAD
        + """
workloads:
  chat: {prompt_tokens: "800:1000", output_tokens: "lognormal:250,80,1,1024"}
  assistants: {prompt_tokens: 447, output_tokens: 248, shared_prefix: {tokens: 100, groups: 9}, unique_prompts: 45}
  talk: {prompt_tokens: 200, output_tokens: 150, turns: 4}
  recorded: {trace: t.csv}
sweeps:
  steps: {kind: concurrency, workload: chat, concurrency: [1, 8, 64]}
  talks: {kind: concurrency, workload: talk, concurrency: [4], requests: 40}
  rates: {kind: arrival_rate, workload: assistants, rates_per_s: [2, 8], requests: 600, arrivals: constant}
  capped: {kind: arrival_rate, workload: chat, rates_per_s: [2], concurrency: 4}
  bursts: {kind: burst, workload: chat, requests: [50, 200]}
  replay: {kind: trace, workload: recorded, speeds: [1, 2.5]}
"""
    )
    (tmp_path / "p.yaml").write_text(text)
    p = params.read_file(tmp_path / "p.yaml")
    names = {s: [x.point for x in p.sweep_points(s, "vllm")] for s in p.sweeps}
    assert names["steps"] == ["c0001", "c0008", "c0064"] and names["bursts"] == ["b00050", "b00200"]
    assert names["replay"] == ["x001.000", "x002.500"] and names["rates"] == ["r2.000", "r8.000"]
    replay = p.sweep_points("replay", "vllm")[1]
    assert (replay.prompt_tokens, replay.output_tokens, replay.requests, replay.closed) == (15, 5, 2, False)
    assert request_plan.due_times(replay, p.load, 2).tolist() == [0.0, 0.4]
    assert p.sweep_points("capped", "vllm")[0].clients is None
    again = params.read_text(params.dump(p), "stored", tmp_path)  # what a run stores says the same
    assert again == p and again.sweep_points("steps", "vllm") == p.sweep_points("steps", "vllm")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (CHAT, "no sweep uses the workload chat"),
        (CHAT + STEPS.replace("chat", "chats"), "names the workload 'chats'"),
        (CHAT + "sweeps: {s: {kind: trace, workload: chat}}\n", "which has no trace"),
        (CHAT + "sweeps: {t: {kind: trace, prompt_tokens: 9, output_tokens: 9}, s: {kind: burst, workload: chat, "
         "requests: [2]}}\n", "sweep t replays no trace"),
        (CHAT + STEPS.replace("workload: chat", "prompt_tokens: 5"), "either a workload or both"),
        (CHAT.replace("800:1000", "1000:800") + STEPS, "'1000:800' is not a length"),
        (CHAT.replace("800:1000", "-5") + STEPS, "'-5' is not a length"),
        (CHAT.replace("prompt_tokens: \"800:1000\", ", "") + STEPS, "no prompt_tokens and output_tokens"),
        (CHAT.replace("}}", ", shared_prefix: {tokens: 900}}}") + STEPS, "shared_prefix takes 900 tokens"),
        (CHAT.replace("}}", ", turns: 3}}") + "sweeps: {s: {kind: burst, workload: chat, requests: [5]}}", "waits for"),
        (CHAT.replace("}}", ", colour: 3}}") + STEPS, "unknown key workloads.chat.colour"),
        ("workloads: {t: {trace: no.csv}}\nsweeps: {s: {kind: trace, workload: t}}\n", "cannot read the trace"),
        ("workloads: {t: {trace: no.csv, turns: 2}}\nsweeps: {s: {kind: trace, workload: t}}\n", "trace already gives"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(text, what):
    with pytest.raises(ServebookError, match=what) as caught:
        params.read_text(HEAD + text)
    assert "\n" not in str(caught.value)


def test_arrivals_of_a_point_are_the_same_on_both_sides():
    spec = PointSpec("rates", "vllm", "r2.000", "arrival_rate", 10, 5, rate_per_s=2.0)
    load = params.Load(seed=7)
    a, b = request_plan.due_times(spec, load, 100), request_plan.due_times(spec, load, 50)
    assert (a[:50] == b).all() and abs(a[-1] / 99 - 0.5) < 0.15
    assert not (request_plan.due_times(spec, params.Load(seed=8), 50) == b).all()


def test_a_run_keeps_its_trace_and_its_pack_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "outputs"))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1,10,5\n2,20,5\n")
    text = HEAD + "workloads: {recorded: {trace: t.csv}}\nsweeps: {replay: {kind: trace, workload: recorded}}\n"
    (tmp_path / "w.yaml").write_text(text)
    book = Book.open(tmp_path / "w.yaml", create=True)
    (tmp_path / "t.csv").unlink()
    stored = Book.at(book.dir)
    (spec,) = stored.specs("vllm", "replay")
    assert spec.workload.rows().prompt_tokens.tolist() == [10, 20]
    assert spec.workload.identity() == book.specs("vllm", "replay")[0].workload.identity()
    point = MeasuredPoint(
        sweep="replay", engine="vllm", point_id=spec.point, kind="trace", prompt_tokens=15, output_tokens=5, requests=2
    )
    results.write_point(book.dir, point)
    results.rows_path(book.dir, "replay", "vllm", spec.point).write_text('{"i": 0, "ok": true, "phase": "measured"}\n')
    assert Book.at(pack(book.dir, tmp_path / "packed")).params == stored.params


def test_prompts_over_the_context_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path))
    text = HEAD + CHAT.replace("800:1000", "800:400000") + STEPS
    (tmp_path / "w.yaml").write_text(text)
    with pytest.raises(ServebookError, match=r"steps asks for 400,000 prompt and 1,024 output tokens, more"):
        Book.open(tmp_path / "w.yaml")
