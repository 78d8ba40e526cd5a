"""The cheapest set-up for a service level: what fits, what meets the level, the answer and what is done with it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from servebook import charts
from servebook.cli import choose as cli_choose
from servebook.cli.command import main
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config import params
from servebook.config.request_plan import RequestPlan
from servebook.engines.vllm import serve_flags
from servebook.hardware import catalog, prices
from servebook.model import reader
from servebook.predictor import choice_answer, choice_search, set_ups
from servebook.predictor.choice import Choice, choose
from servebook.predictor.choice_search import Candidate, Search
from servebook.predictor.refusal import Refusal
from servebook.predictor.scenario import Scenario
from servebook.predictor.steady_state import Lengths, closed, steady
from servebook.predictor.target_load import Target, Trial, attempt, chance, reach
from servebook.report import choice as pages
from servebook.run import choice_files, choice_measured, pipeline, router_files
from servebook.run.choosing import choice_for, priced_gpus
from servebook.run_folder import results
from servebook.run_folder.stored_run import StoredRun

TEXT = """
run: chat
title: chat
model: {config: qwen2.5-7b, weights: dummy}
hardware: {gpu: H200}
engines: {vllm: {kind: vllm}}
workloads:
  chat: {prompt_tokens: "lognormal:800,600,32,4000", output_tokens: "lognormal:250,200,8,2000"}
slo: {ttft_s: 0.5, ttft_percentile: 99, tpot_s: 0.03, target: {rate_per_s: 20, workload: chat}}
choose:
  gpus: {H200: 4.59, L40S: 1.95}
  max_gpus: 4
  tensor_parallel_size: [1, 2]
  pipeline_parallel_size: [1]
  max_num_batched_tokens: [2048, 8192]
  max_num_seqs: [256]
"""


def with_settings(s: set_ups.SetUp, **changes: Any) -> set_ups.SetUp:
    return dataclasses.replace(s, engine=s.engine.model_copy(update=changes))


def run_of(text: str = TEXT, base: Path = Path()) -> StoredRun:
    return StoredRun(params.read_text(text, base=base), base / "nowhere", base)


@pytest.fixture(scope="module", autouse=True)
def few_draws() -> Iterator[None]:
    """A search in a second: a third of the draws, each half as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice_search, "DRAWS", 4)
        patch.setattr(choice_search, "FINE_REQUESTS", 150)
        yield


@pytest.fixture(scope="module")
def choice(few_draws: None) -> Choice:
    return choice_for(run_of(), "chat.yaml")


@pytest.fixture(scope="module")
def found(choice: Choice) -> dict[str, Any]:
    return choice_answer.answer(choice)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(TEXT)
    return path


# --- the question ----------------------------------------------------------------------------------------------------


def test_a_level_has_a_percentile_for_each_limit() -> None:
    slo = params.read_text(TEXT).slo
    assert slo.limits == {"ttft_s": (0.5, 99.0), "tpot_s": (0.03, 90.0)}
    assert "percentile" not in slo.model_dump() and "target" in slo.model_dump()
    assert params.Slo(ttft_s=1.0).model_dump() == {"ttft_s": 1.0, "tpot_s": None, "e2e_s": None}, "as stored before"


def test_a_conversation_has_users() -> None:
    with pytest.raises(ServebookError, match=r"a conversation waits for its answers\. Give users"):
        params.read_text(TEXT.replace('"lognormal:250,200,8,2000"', '"lognormal:250,200,8,2000", turns: 4'))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{rate_per_s: 0, workload: chat}", "slo.target.rate_per_s: a target load of zero needs no server"),
        ("{users: 0, workload: chat}", "slo.target.users: a target load of zero needs no server"),
        ("{rate_per_s: 1, users: 2, workload: chat}", "exactly one of rate_per_s, users and trace_speed"),
        ("{workload: chat}", "found none"),
        ("{rate_per_s: 1, workload: talk}", "slo.target names the workload 'talk'. Workloads of this run: chat"),
        ("{trace_speed: 1, workload: chat}", "replays a trace"),
        ("{users: 2, workload: chat, arrivals: gamma}", "gamma arrivals come at a rate"),
        ("{rate_per_s: 2, workload: chat, gamma_shape: 0.5}", "gamma_shape is unused for poisson arrivals"),
    ],
)
def test_a_target_that_is_none_is_one_line(target: str, said: str) -> None:
    with pytest.raises(ServebookError) as found:
        params.read_text(TEXT.replace("{rate_per_s: 20, workload: chat}", target))
    assert said in found.value.line() and "\n" not in found.value.line()


def test_every_list_price_names_a_card_a_day_and_a_page() -> None:
    for name, price in prices.list_prices().items():
        assert name in catalog.catalog() and price.usd_per_hour > 0
        assert price.read.year >= 2026 and price.list.startswith("https://") and price.via.startswith("https://")
        assert str(price.read) in price.origin()
    with pytest.raises(ServebookError, match="is not in the catalog"):
        prices.read_prices("X1: {usd_per_hour: 1.0, provider: p, read: 2026-01-01, list: u, via: u}", "prices.yaml")


def test_prices_are_the_users_first() -> None:
    run = run_of()
    asked = run.params.choose
    assert asked is not None
    assert [(c.gpu.name, c.price_per_hour) for c in priced_gpus(run, ["A40=0.3", "H100-SXM"], asked, "f")] == [
        ("A40", 0.3), ("H100-SXM", prices.list_prices()["H100-SXM"].usd_per_hour),
    ]  # fmt: skip
    own = run_of(TEXT.replace("{gpu: H200}", "{gpu: H200, price_per_hour: 2.0}").split("choose:")[0])
    every = {c.gpu.name: c for c in priced_gpus(own, [], params.SearchSpace(), "f")}
    assert set(every) == set(prices.list_prices()) and every["H200"].price_per_hour == 2.0
    for options, said in ((["H200=-1"], "is not a price"), (["=3"], "names no GPU"), (["H200", "H200"], "given twice")):
        with pytest.raises(ServebookError, match=said):
            priced_gpus(run, options, asked, "f")


# --- the closed form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [{"rate_per_s": 4.0}, {"rate_per_s": 16.0}, {"users": 64}])
def test_the_closed_form_is_near_the_simulation(choice: Choice, load: dict[str, float]) -> None:
    c = next(c for c in choice.candidates if c.set_up.gpu.name == "H200" and c.set_up.gpus == 1)
    target = Target(800, 250, choice.target.workload, "chat", **load)  # type: ignore[arg-type]
    at = target.lengths(choice.workshop.load)
    form = closed(c.server, c.times, at, 64) if "users" in load else steady(c.server, c.times, at, load["rate_per_s"])
    scenario: Scenario = target.scenario(c.server, 1, choice.workshop.load, 300)
    simulated = scenario.simulate(c.times, 1, 320)
    assert form.tpot_s == pytest.approx(simulated.mean("tpot_s"), rel=0.25)
    assert form.running == pytest.approx(simulated.running_mean, rel=0.3)


def test_mean_lengths_weigh_a_request_by_how_long_it_runs() -> None:
    plan = RequestPlan(params.Workload(prompt_tokens=100, output_tokens=50, turns=2), 1, "w")
    at = Lengths.of([plan[0], plan[1]])
    assert (at.prompt, at.output, at.new) == ((100 + 250) / 2, 50, 100)
    assert at.context == (50 * 125 + 50 * 275) / 100


# --- the search ------------------------------------------------------------------------------------------------------


def test_the_choice_is_the_cheapest_that_is_sure_enough(choice: Choice) -> None:
    """Against the third look at every set-up with every number of replicas."""
    search = choice.search_at(choice.target)
    sure = []
    for c in choice.candidates:
        for replicas in range(1, search.most_replicas(c) + 1):
            cost = replicas * c.set_up.gpus * c.set_up.card.price_per_hour
            if cost > choice.chosen.cost_per_hour + 1e-9 or search.estimated(c, replicas).utilization > 1.1:
                continue
            judged = search.simulate_draws(c, replicas)
            if judged is not None and judged.probability >= choice.space.confidence:
                sure.append((round(cost, 6), c.set_up.name, replicas))
    assert min(sure)[0] == pytest.approx(choice.chosen.cost_per_hour)
    assert (round(choice.chosen.cost_per_hour, 6), choice.chosen.set_up.name, choice.chosen.replicas) in sure


def test_the_same_seed_gives_the_same_answer(found: dict[str, Any]) -> None:
    again = choice_for(run_of(), "chat.yaml")
    assert json.dumps(choice_answer.answer(again)) == json.dumps(found)


def test_a_tighter_level_costs_no_less_and_a_dearer_card_is_left(choice: Choice) -> None:
    tight = choice_for(run_of(TEXT.replace("tpot_s: 0.03", "tpot_s: 0.008")), "f")
    assert tight.chosen.cost_per_hour >= choice.chosen.cost_per_hour
    chosen = choice.chosen.set_up.gpu.name
    dear = choice_for(run_of(), "f", [f"{chosen}=100", *(f"{g}=1" for g in ("H200", "L40S") if g != chosen)])
    assert dear.chosen.set_up.gpu.name != chosen


def test_probability_falls_with_the_load_and_replicas_share_it(choice: Choice) -> None:
    search, c = choice.search_at(choice.target), choice.chosen
    assert c.replicas is not None and c.judged is not None
    twice = choice.search_at(choice.target.times(2.0))
    shared = twice.simulate_draws(c, 2 * c.replicas)
    assert shared is not None and shared.probability == pytest.approx(c.judged.probability, abs=0.15)
    loads = [choice.search_at(choice.target.times(f)).simulate_draws(c, c.replicas) for f in (0.5, 1.0, 1.5)]
    sure = [j.probability if j else 0.0 for j in loads]
    assert sure == sorted(sure, reverse=True)
    assert search.estimated(c, c.replicas).utilization < 1
    for m, v in c.judged.values.items():
        assert v["low"] < v["value"] < v["high"] and 0 < c.judged.by_limit[m] <= 1


def test_bursts_are_a_load_too(choice: Choice, tmp_path: Path) -> None:
    """Gamma gaps cost TTFT at the same rate, and what is measured arrives so, too."""
    c = next(c for c in choice.candidates if c.set_up.gpu.name == "H200" and c.set_up.gpus == 1)

    def ttft(target: Target) -> float:
        found = attempt(
            c.server, c.times, target, 1, {"ttft_s": (1.0, 90.0)}, load=choice.workshop.load, running=20, requests=300
        )
        assert found is not None
        return found.values["ttft_s"]

    bursts = dataclasses.replace(choice.target, arrivals="gamma", gamma_shape=0.1)
    assert ttft(bursts) > 1.5 * ttft(choice.target) and "gamma gaps of shape 0.1" in bursts.text()
    many = Choice(**{**choice.__dict__, "target": bursts})
    run = params.read_file(choice_files.write_params(many, Path(), tmp_path)[0])
    sweep = run.sweeps["target-choice"]
    assert (sweep.arrivals, sweep.gamma_shape) == ("gamma", 0.1)  # type: ignore[union-attr]


def test_the_fewest_replicas_are_found_from_above_and_below() -> None:
    """Whatever number the closed form starts with, in four simulations where the latency falls as 1 / replicas."""

    def trial(n: int, needs: float) -> Trial:
        return Trial(n, {}, {"ttft_s": needs / n}, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0)

    for needs in (1, 3, 5, 8):
        for start in (1, 4, 8, 12):
            tried: dict[int, Trial] = {}
            n: int | None = start
            while n is not None and len(tried) < 2 * choice_search.MOST_TRIALS:
                tried[n] = trial(n, needs)
                n = Search._next(n, tried, 12)
            assert min(k for k, t in tried.items() if t.worst <= 1) == needs, (needs, start, sorted(tried))


def test_a_stated_probability_is_the_share_of_an_interval() -> None:
    drawn = [0.9, 1.0, 1.1]
    for q in (0.1, 0.5, 0.9):
        assert chance(drawn, reach(drawn, 0.2, q), 0.2) == pytest.approx(q, abs=1e-6)
    assert chance([1.0], 1.0, 0.2) == 0.5 and chance([math.inf, 1.0], 1.0, 0.2) == 0.25
    assert reach([math.inf], 0.2, 0.5) == math.inf
    # an error of unknown size has more of the far misses than a normal one: 7.0 % beyond 2 sd against 2.3 %
    assert 1 - chance([1.0], math.exp(2 * 0.2), 0.2) == pytest.approx(0.0697, abs=1e-3)


def test_one_cards_kinds_leave_room_for_other_cards(choice: Choice) -> None:
    """Rivals: no card takes all places, and where a kind was found that reaches the confidence, it is that one."""
    cards = [c.set_up.gpu.name for c in choice.rivals]
    assert len(set(cards)) > 1 and max(map(cards.count, cards)) <= 3
    assert [c.cost_per_hour for c in choice.rivals] == sorted(c.cost_per_hour for c in choice.rivals)


def test_the_tightest_limit_is_the_one_that_is_nearest(choice: Choice) -> None:
    assert choice.chosen.judged is not None
    trials = [dataclasses.replace(t, ratios={"ttft_s": 0.15, "tpot_s": 0.6}) for t in choice.chosen.judged.trials]
    sure = {"ttft_s": 0.995, "tpot_s": 0.999}  # long tails, both all but certain
    judged = dataclasses.replace(choice.chosen.judged, trials=tuple(trials), by_limit=sure)
    assert judged.tightest == "tpot_s"
    assert dataclasses.replace(judged, by_limit={"ttft_s": 0.9, "tpot_s": 0.999}).tightest == "ttft_s"


def test_of_two_that_are_all_but_certain_the_one_that_carries_more(choice: Choice) -> None:
    search, one = choice.search_at(choice.target), choice.chosen
    assert one.judged is not None
    small = with_settings(one.set_up, max_num_seqs=8)
    server = choice.workshop.limits(small, *choice.target.longest())
    assert server is not None
    judged = dataclasses.replace(one.judged, probability=0.999)
    tight = Candidate(small, server, one.times, replicas=one.replicas, judged=judged)
    roomy = dataclasses.replace(one, judged=dataclasses.replace(one.judged, probability=0.992))
    assert search.spare(tight) < search.spare(roomy) <= choice_search.MOST_SPARE
    assert max([tight, roomy], key=search._preferred) is roomy
    slightly = dataclasses.replace(tight, judged=dataclasses.replace(judged, probability=0.812))
    less = dataclasses.replace(roomy, judged=dataclasses.replace(judged, probability=0.805))
    assert max([slightly, less], key=search._preferred) is less, "12 draws do not tell 80 from 81 %"
    surer = dataclasses.replace(tight, judged=dataclasses.replace(judged, probability=0.9))
    assert max([surer, less], key=search._preferred) is surer
    wide = dataclasses.replace(roomy, set_up=with_settings(roomy.set_up, pipeline_parallel_size=2))
    assert search._preferred(roomy)[-3] > search._preferred(wide)[-3], "fewer GPUs a replica"


def test_users_and_a_trace_are_loads_too(tmp_path: Path) -> None:
    users = choice_for(run_of(TEXT.replace("rate_per_s: 20", "users: 48")), "f")
    assert users.chosen.trial is not None and users.chosen.judged is not None
    rows = "".join(f"{i * 0.1},{300 + i % 7 * 100},{40 + i % 5 * 20}\n" for i in range(400))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    text = TEXT.replace(
        '{prompt_tokens: "lognormal:800,600,32,4000", output_tokens: "lognormal:250,200,8,2000"}', "{trace: t.csv}"
    )
    replayed = choice_for(run_of(text.replace("rate_per_s: 20", "trace_speed: 2"), tmp_path), "f")
    assert replayed.target.mean_rate_per_s() == pytest.approx(20, rel=0.02)
    assert replayed.chosen.judged is not None and replayed.chosen.judged.probability >= 0.8
    written = choice_files.write_params(replayed, tmp_path, tmp_path / "new" / "folder")
    assert len(params.read_file(written[0]).workloads["chat"].rows().arrival_s) == 400


def test_what_may_be_turned(choice: Choice) -> None:
    run, space = run_of(), params.SearchSpace()
    cards = {n: catalog.catalog()[n] for n in ("T4", "A100-80GB-SXM", "H200")}
    plain = run.params.model
    assert set_ups.precisions(plain, space, run.shape, cards["T4"]) == [(None, "auto")]
    assert set_ups.precisions(plain, space, run.shape, cards["A100-80GB-SXM"]) == [(None, "auto"), ("fp8", "auto")]
    assert len(set_ups.precisions(plain, space, run.shape, cards["H200"])) == 4
    given = plain.model_copy(update={"quantization": "fp8", "kv_cache_dtype": "fp8"})
    assert set_ups.precisions(given, space, run.shape, cards["H200"]) == [("fp8", "fp8")]
    assert all(at.data == 1 and not at.expert for at in set_ups.layouts(space, run.shape)), "a dense model's replicas"
    assert all(c.set_up.engine.prefix_caching for c in choice.candidates), "no prompt repeats"
    assert sum(choice.dropped.values()) + len(choice.candidates) == choice.searched


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("config: qwen2.5-7b", "config: gemma-2-9b", "no card holds the model and its requests ("),
        ("tpot_s: 0.03", "tpot_s: 0.0001", "no set-up meets the service level; the nearest is"),
        ("rate_per_s: 20", "rate_per_s: 900", "of 900 requests/s. Relax that limit"),
        ("{kind: vllm}", "{kind: vllm, extra_args: [-tp, '2']}", "extra_args: the search itself sets tp"),
        ("250,200,8,2000", "250,200,8,40000", "exceed qwen2.5-7b's context"),
        (", target: {rate_per_s: 20, workload: chat}", "", "no target load"),
        ("ttft_s: 0.5, ttft_percentile: 99, tpot_s: 0.03, ", "", "no service level is given"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_line(old: str, new: str, said: str) -> None:
    text = TEXT.replace(old, new)
    if "gemma" in new:
        text = text.split("choose:")[0] + "choose: {gpus: {T4: 0.5}, max_gpus: 1}\n"
        text = text.replace("weights: dummy", "weights: dummy, dtype: float16")
    if not new:
        text = text.replace(
            "workloads:\n  chat:",
            "sweeps:\n  s: {kind: concurrency, workload: chat, concurrency: [1]}\nworkloads:\n  chat:",
        )
    with pytest.raises(ServebookError) as found:
        choice_for(run_of(text), "chat.yaml")
    line = found.value.line()
    assert said in line and "\n" not in line and line.startswith("chat.yaml")


def test_the_nearest_says_by_how_much(tmp_path: Path) -> None:
    with pytest.raises(ServebookError) as found:
        choice_for(run_of(TEXT.replace("tpot_s: 0.03", "tpot_s: 0.001")), "chat.yaml")
    assert "TPOT p90" in found.value.line() and "limit 0.001 s" in found.value.line()


def test_a_missing_price_and_no_cards_are_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", str(file), "--gpu", "RTX-4090"]) == 1
    assert "no price is known for RTX-4090. Write --gpu RTX-4090=PRICE per hour" in capsys.readouterr().err
    assert main(["choose", str(file), "--max-gpus", "0"]) == 1
    assert "0 is not a number of GPUs" in capsys.readouterr().err
    assert main(["choose", str(file), "--gpu", "H2000=1"]) == 1
    assert "--gpu H2000: unknown GPU 'H2000'" in capsys.readouterr().err


def test_a_processor_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "detect", catalog.cpu)
    with pytest.raises(ServebookError, match="--gpu detect: no GPU is found on this machine"):
        priced_gpus(run_of(), ["detect=3"], params.SearchSpace(), "f")


def test_a_budget_below_the_sequences_is_one_line() -> None:
    with pytest.raises(ServebookError, match="choose: a budget of 128 tokens is less than one for each of 256 seq"):
        run_of(TEXT.replace("max_num_batched_tokens: [2048, 8192]", "max_num_batched_tokens: [64, 128]"))


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--html", "folder", "is a folder. Give the name of a file"),
        ("--html", "file/page.html", "file: cannot write"),
        ("--write-params", "file/new", "file/new: cannot write"),
        ("--measured", "folder", "no run is stored here"),
    ],
)
def test_what_cannot_be_written_or_read_is_told_before_the_search(
    option: str, name: str, said: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cli_choose, "choice_for", lambda *_: pytest.fail("it searched first"))
    assert main(["choose", str(file), option, str(tmp_path / name)]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


# --- what is done with it --------------------------------------------------------------------------------------------


def test_the_command_line_answers_writes_and_renders(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, into = tmp_path / "choice.html", tmp_path / "runs"
    assert main(["choose", str(file), "--json", "--html", str(page), "--write-params", str(into)]) == 0
    found = json.loads(capsys.readouterr().out)
    chosen = found["chosen"]
    assert chosen["probability"] >= 0.8 and chosen["cost_per_hour"] == pytest.approx(
        chosen["replicas"] * chosen["gpus"] * chosen["price_per_gpu_hour"]
    )
    tokens = chosen["output_tok_per_s"] * 3600 / 1e6
    assert chosen["cost_per_million_output_tokens"] == pytest.approx(chosen["cost_per_hour"] / tokens)
    assert chosen["room"] >= 1 and chosen["binds"]["by"] in ("bandwidth", "compute", "host", "link", "KV")
    assert sum(chosen["binds"]["shares"].values()) == pytest.approx(1, abs=0.05)
    assert all(r["wins_if"] for r in found["rivals"]) and len(found["rivals"]) >= 2
    html = page.read_text()
    assert chosen["name"] in html and pages.command(found["serve"]) in html and "<script" not in html
    written = [Path(p) for p in found["written"]]
    assert all(p.is_file() for p in written)
    engines = {e for p in written if not p.name.startswith("router") for e in params.read_file(p).engines}
    assert engines == {"choice", "rival-1", "rival-2"}


def test_the_answer_is_readable(choice: Choice, found: dict[str, Any]) -> None:
    text = cli_choose.text(choice, found | {"serve": "vllm serve …"})
    assert choice.chosen.set_up.name in text and "headroom" in text and "bound by" in text and "vllm serve" in text
    assert "wins with" in text and "searched" in text


def test_a_written_run_measures_one_replicas_share(choice: Choice, tmp_path: Path) -> None:
    search, c = choice.search_at(choice.target), choice.chosen
    many = Choice(**{**choice.__dict__, "chosen": Candidate(**{**c.__dict__, "replicas": 2})})
    assert search.most_replicas(c) >= 2
    files = {p.name: p for p in choice_files.write_params(many, Path(), tmp_path)}
    run = params.read_file(files["chat-choice.yaml"])
    sweep = run.sweeps["target-choice"]
    assert sweep.rates_per_s == [10.0] and sweep.engines == ["choice"]  # type: ignore[union-attr]
    engine = run.engines["choice"]
    assert serve_flags(run.model, engine) == serve_flags(c.set_up.model(choice.workshop.params.model), c.set_up.engine)  # type: ignore[arg-type]
    assert run.load.max_seconds * 10.0 > run.load.min_requests, "time for the requests that a percentile needs"
    assert run.hardware.price_per_hour == pytest.approx(c.set_up.card.price_per_hour * c.set_up.gpus)
    stack = yaml.safe_load(files["router-production-stack.yaml"].read_text())["servingEngineSpec"]["modelSpec"][0]
    assert stack["replicaCount"] == 2 and stack["modelURL"] == "Qwen/Qwen2.5-7B-Instruct"
    assert str(c.set_up.engine.max_num_batched_tokens) in stack["vllmConfig"]["extraArgs"]
    ray = yaml.safe_load(files["router-ray-serve.yaml"].read_text())["applications"][0]["args"]["llm_configs"][0]
    assert ray["deployment_config"] == {"num_replicas": 2}
    assert ray["engine_kwargs"]["max_num_seqs"] == c.set_up.engine.max_num_seqs


def test_what_is_not_modelled_is_said() -> None:
    text = TEXT.replace("{kind: vllm}", "{kind: vllm, extra_args: [--speculative-config, '{}']}").split("choose:")[0]
    few = "choose: {gpus: {H200: 4}, max_gpus: 1, quantization: [none], kv_cache_dtype: [auto], max_num_seqs: [256]}\n"
    choice = choice_for(run_of(text + few), "f")
    found = choice_answer.answer(choice) | {"serve": ""}
    assert "not modelled: --speculative-config" in cli_choose.text(choice, found)
    assert "not modelled: --speculative-config" in pages.basis(choice)


def routers(choice: Choice, **changes: Any) -> dict[str, Any]:
    """The written files of two replicas of the choice, with some settings changed."""
    c = choice.chosen
    s = with_settings(c.set_up, **changes)
    many = Choice(**{**choice.__dict__, "chosen": Candidate(**{**c.__dict__, "replicas": 2, "set_up": s})})
    texts = router_files.router_configs(many, choice_files.served_model(choice.workshop.params.model))
    return {name: yaml.safe_load(text) for name, text in texts.items()}


def test_routers_get_names_that_services_may_have_and_no_file_for_what_they_build_otherwise(choice: Choice) -> None:
    files = routers(choice, data_parallel_size=2)
    assert list(files) == ["router-production-stack.yaml", "router-llm-d.yaml"]
    stack = files["router-production-stack.yaml"]["servingEngineSpec"]["modelSpec"][0]
    assert stack["name"] == "qwen2-5-7b-instruct" and stack["requestGPU"] == 2
    extra = stack["vllmConfig"]["extraArgs"]
    assert extra[extra.index("--data-parallel-size") + 1] == "2" and "--served-model-name" not in extra
    assert not {"--max-num-seqs", "--dtype", "--enable-prefix-caching"} & set(extra), "the chart sets these itself"


def test_every_router_serves_every_setting_of_the_choice(choice: Choice) -> None:
    """What the command line says, no router's file loses: own flags, eager mode, no prefix caching, the card."""
    own = {
        "enforce_eager": True,
        "prefix_caching": False,
        "tensor_parallel_size": 2,
        "extra_args": ["--block-size", "32"],
    }
    files, name = routers(choice, **own), choice.chosen.set_up.gpu.name
    stack = files["router-production-stack.yaml"]["servingEngineSpec"]["modelSpec"][0]
    assert stack["vllmConfig"]["tensorParallelSize"] == 2 and stack["vllmConfig"]["enablePrefixCaching"] is False
    assert {"--enforce-eager", "--block-size", "32"} <= set(stack["vllmConfig"]["extraArgs"])
    config = files["router-ray-serve.yaml"]["applications"][0]["args"]["llm_configs"][0]
    kwargs = config["engine_kwargs"]
    assert kwargs["enforce_eager"] is True and kwargs["enable_prefix_caching"] is False and kwargs["block_size"] == 32
    assert kwargs["tensor_parallel_size"] == 2 and "served_model_name" not in kwargs
    assert config["accelerator_type"] == router_files.RAY_CARDS[name], "or a replica lands on any card of the cluster"
    pod = files["router-llm-d.yaml"]["spec"]["template"]["spec"]["containers"][0]
    assert pod["args"][0] == "Qwen/Qwen2.5-7B-Instruct" and {"--block-size", "--enforce-eager"} <= set(pod["args"])
    assert files["router-llm-d.yaml"]["spec"]["replicas"] == 2 and pod["resources"]["limits"]["nvidia.com/gpu"] == 2


def test_a_card_of_amd_gets_its_image_and_its_resource(choice: Choice) -> None:
    c, card = choice.chosen, set_ups.PricedGpu(catalog.catalog()["MI300X"], 2.0, "given")
    s = set_ups.SetUp(card, None, "auto", c.set_up.engine)
    many = Choice(**{**choice.__dict__, "chosen": Candidate(**{**c.__dict__, "replicas": 2, "set_up": s})})
    files = {n: yaml.safe_load(t) for n, t in router_files.router_configs(many, "a/b").items()}
    stack = files["router-production-stack.yaml"]["servingEngineSpec"]["modelSpec"][0]
    assert stack["requestGPUType"] == "amd.com/gpu" and stack["repository"].endswith("-rocm")
    limits = files["router-llm-d.yaml"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["amd.com/gpu"] == 1 and "nvidia.com/gpu" not in limits
    assert set(router_files.RAY_CARDS) <= set(catalog.catalog())


def test_a_card_of_ones_own_is_written_with_its_figures(tmp_path: Path) -> None:
    own = (
        "{figures: {name: X1, tensor_tflops: 900, memory_bandwidth_gb_per_s: 4000, memory_gib: 90}, price_per_hour: 3}"
    )
    run = run_of(TEXT.replace("{gpu: H200}", own).split("choose:")[0] + "choose: {max_gpus: 1, max_num_seqs: [256]}\n")
    cards = priced_gpus(run, [], params.SearchSpace(), "f")
    assert cards[-1].gpu.name == "X1" and cards[-1].price_per_hour == 3
    shapes = {(None, "auto"): run.shape}
    space = params.SearchSpace(quantization=["none"], kv_cache_dtype=["auto"], max_gpus=1, max_num_seqs=[256])
    found = choose(run.params, cards[-1:], shapes, where="f", space=space)
    written = params.read_file(choice_files.write_params(found, tmp_path, tmp_path)[0])
    assert written.hardware.figures == run.params.hardware.figures and written.hardware.price_per_hour == 3


def test_every_packaged_model_can_be_served_by_its_hub_id() -> None:
    assert {n for n in reader.packaged() if not n.startswith("tiny")} == set(reader.SHIPPED.values())


def test_the_command_serves_the_model_itself(choice: Choice) -> None:
    line = choice_files.serve_command(choice, choice.chosen.set_up)
    assert line.startswith("vllm serve Qwen/Qwen2.5-7B-Instruct ") and "dummy" not in line
    assert f"--max-num-seqs {choice.chosen.set_up.engine.max_num_seqs}" in line


def measured_run(choice: Choice, folder: Path, **seconds: float) -> Path:
    """A run folder of what --write-params wrote, as if every request had taken just so long."""
    written = choice_files.write_params(choice, Path(), folder / "params")
    run_params = params.read_file(written[0])
    run_dir = folder / run_params.run
    run_dir.mkdir()
    (run_dir / "params.yaml").write_text(params.dump(run_params))
    for engine in run_params.engines:
        spec = run_params.sweep_points(f"target-{engine}", engine)[0]
        point = {
            "sweep": spec.sweep, "engine": engine, "point": spec.point, "kind": spec.kind, "verdict": "valid",
            "rate_per_s": spec.rate_per_s, "prompt_tokens": spec.prompt_tokens, "output_tokens": spec.output_tokens,
            "requests": 200, "reasons": [],
        }  # fmt: skip
        path = results.point_path(run_dir, spec.sweep, engine, spec.point)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(point))
        writer = results.RowWriter(results.rows_path(run_dir, spec.sweep, engine, spec.point))
        for i in range(200):
            row = dict.fromkeys(results.ROW_KEYS) | {"i": i, "phase": "measured", "ok": True, "turn": 0}
            spread = 0.98 + 0.04 * (i % 11) / 10
            writer.write(row | {m: v * spread for m, v in seconds.items()})
        writer.close()
    return run_dir


def test_a_measured_choice_stands_or_does_not(choice: Choice, tmp_path: Path) -> None:
    assert choice.chosen.judged is not None
    as_predicted = {m: v["value"] for m, v in choice.chosen.judged.values.items()}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    good = choice_measured.check(choice, [measured_run(choice, tmp_path / "a", **as_predicted)])
    assert good["stands"] is True and "the choice is confirmed" in good["lines"][-1]
    assert any("inside" in line for line in good["lines"]) and not any("contradicted" in line for line in good["lines"])
    slow = {m: 3 * limit for m, (limit, _) in choice.limits.items()}
    bad = choice_measured.check(choice, [measured_run(choice, tmp_path / "b", **slow)])
    assert bad["stands"] is False and "is not confirmed" in bad["lines"][-1]
    sure = choice.chosen.judged.probability
    assert any("contradicted" in line for line in bad["lines"]) == (sure > 0.95)


@pytest.mark.parametrize(
    ("clients", "replicas"), [(64, 1), (32, 2), (22, 3), (16, 4), (128, None), (40, None), (20, None)]
)
def test_a_point_counts_where_replicas_take_just_its_share(choice: Choice, clients: int, replicas: int | None) -> None:
    users = Target(799, 252, users=64)
    at = Choice(**{**choice.__dict__, "target": users})
    point = MeasuredPoint(sweep="s", engine="e", point_id="c", kind="concurrency", concurrency=clients,
                          prompt_tokens=799, output_tokens=252)  # fmt: skip
    assert choice_measured._replicas(at, point) == replicas


def test_a_run_without_the_target_load_is_one_line(choice: Choice, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(TEXT.split("choose:")[0])
    with pytest.raises(ServebookError, match="no point of the target load was measured there"):
        choice_measured.check(choice, [tmp_path])


def test_the_front_is_what_nothing_beats(choice: Choice, found: dict[str, Any]) -> None:
    rows = [
        {"name": n, "user_tok_per_s": x, "output_tok_per_s": y, "cost_per_hour": 3.6} for n, x, y in
        (("a", 10, 100), ("b", 20, 50), ("c", 15, 40), ("d", 20, 60), ("e", None, 1), ("f", 5, None))
    ]  # fmt: skip
    assert [r["name"] for r in charts.choice.front(rows)] == ["a", "d"] and charts.choice.cost(rows[0]) == 10
    cheap = {"gpu": choice.chosen.set_up.gpu.name, "user_tok_per_s": 30.0, "tok_per_s_per_gpu": 9000.0, "run": "r"}
    measured = [cheap, cheap | {"tok_per_s_per_gpu": 1.0}, cheap | {"gpu": "T4"}]
    text = charts.text_of(charts.choice_front(found["set_ups"], found["chosen"], measured))
    assert choice.chosen.set_up.name in text.takeaway and "1 measured points" in text.note


def test_reasons_are_told_once_for_all_cards() -> None:
    wide, old = Refusal("too wide (8 GPUs: 4 heads)"), Refusal("no bfloat16 {braces}")
    dropped = {("H200", wide): 3, ("T4", old): 4, ("L4", wide): 2}
    assert choice_answer.reasons(dropped) == [(wide.reason, ["H200", "L4"], 5), (old.reason, ["T4"], 4)]
    full = "{:,.1f} GiB of weights leave no KV cache in {:.1f} GiB"
    dropped = {("H200", Refusal(full, (1028, 79.2))): 1, ("L4", Refusal(full, (30.5, 22))): 2}
    [(said, cards, count)] = choice_answer.reasons(dropped)
    assert said == "30.5 to 1,028.0 GiB of weights leave no KV cache in 22.0 to 79.2 GiB"
    assert (cards, count) == (["H200", "L4"], 3)


def test_where_all_fit_no_table_says_why_not(choice: Choice, found: dict[str, Any]) -> None:
    said = pages.dropped_table(replace(choice, dropped={}), found)
    assert "<table" not in said and f"All {found['searched']} set-ups fit" in said
    assert "<table" in pages.dropped_table(replace(choice, dropped={("H200", Refusal("too wide")): 2}), found)


def test_a_command_takes_a_flag_a_line() -> None:
    line = "vllm serve a/b --x 1 --flag --speculative-config '{}'"
    rows = pages.command(line).split("\n  ")
    assert [r.removesuffix(" \\") for r in rows[1:3]] == ["--x 1", "--flag"] and all(r[-1] == "\\" for r in rows[:-1])
    assert rows[0].endswith("vllm serve a/b \\") and "--speculative-config" in rows[3]


def test_a_chapter_where_the_parameters_ask_for_it() -> None:
    asked, silent = params.read_text(TEXT), params.read_text(TEXT.split("choose:")[0])
    assert [s.notebook for s in pipeline.steps(asked, "f")][-1] == "choose"
    assert "choose" not in [s.notebook for s in pipeline.steps(silent, "f")]


def test_the_notebooks_answer_and_its_widgets(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from servebook.lab import choosing

    monkeypatch.setenv("SERVEBOOK_OUTPUTS", str(tmp_path / "outputs"))
    file.write_text(TEXT.replace("[2048, 8192]", "[8192]"))
    answer = choosing.choose(file, ["H200=4.59"])
    bundle = answer._repr_mimebundle_()
    assert answer.found["chosen"]["name"] == bundle["text/plain"]
    assert "vllm serve" in answer.lead() and "wins with" in answer.rivals() and "Prices of one card" in answer.basis()
    panel = choosing.panel(file, answer)
    panel.controls["gpus"].value = ("H200",)
    panel.controls["tpot_s"].value = 0.01
    panel.ask()
    assert "no set-up meets the service level" in panel.message.value and panel.answer is answer
    assert panel.controls["ttft_percentile"].value == 99 and panel.controls["tpot_percentile"].value == 90
    panel.controls["tpot_s"].value = 40.0
    assert "of the settings before" in panel.message.value
    panel.controls["fp8"].value = False
    panel.folder.value = str(tmp_path / "saved")
    panel.ask()
    assert panel.message.value == "" and panel.answer is not answer
    assert {c.set_up.quantization for c in panel.answer.choice.candidates} == {None}  # type: ignore[union-attr]
    panel.save.click()
    assert list((tmp_path / "saved").glob("chat-choice.yaml")) and "written" in panel.message.value
    panel.folder.value = str(tmp_path / "saved" / "chat-choice.yaml" / "below")
    panel.save.click()
    assert "cannot write" in panel.message.value


@pytest.mark.parametrize(
    ("turned", "said"),
    [
        ({"users": 5}, "requests/s and users are two loads. Set one of them to 0"),
        ({"rate_per_s": 0}, "a target load of zero needs no server"),
        ({"gpus": ()}, "no card is selected"),
        ({"ttft_s": 0, "tpot_s": 0}, "no service level is given"),
    ],
)
def test_what_the_controls_cannot_ask_is_said_beside_them(file: Path, turned: dict[str, Any], said: str) -> None:
    from servebook.lab import choosing

    file.write_text(TEXT.replace("{gpu: H200}", "{gpu: A30, price_per_hour: 0.9}").replace("L40S: 1.95", "RTX-4090: 1"))
    panel = choosing.panel(file)
    assert {"A30", "RTX-4090"} <= set(panel.controls["gpus"].options), "cards without a list price, too"
    assert panel.controls["gpus"].value == ("H200", "RTX-4090")
    for name, value in turned.items():
        panel.controls[name].value = value
    panel.ask()
    assert said in panel.message.value and panel.answer is None


def test_a_written_run_is_planned_by_skypilots_rules(choice: Choice, tmp_path: Path) -> None:
    """Every written file names the card to rent, and as many of them as its engines take."""
    for path in choice_files.write_params(choice, Path(), tmp_path):
        if path.name.startswith("router"):
            continue
        run = params.read_file(path)
        cards = {e.tensor_parallel_size * e.pipeline_parallel_size for e in run.engines.values()}  # type: ignore[union-attr]
        assert run.hardware.gpu in catalog.catalog() and len(cards) == 1
