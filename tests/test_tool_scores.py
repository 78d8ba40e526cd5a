"""`servebook score`: results of every tool are read alike, scored per percentile, and told what they lack."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from servebook import cli
from servebook.common.errors import ServebookError
from servebook.scoring import tool_results

PARAMS = """
run: scored
title: Scored
model: {config: mistral-7b-v0.3, weights: dummy}
hardware: {gpu: H200}
engines: {vllm: {kind: vllm, max_num_batched_tokens: 8192, max_model_len: 16384}}
"""
VLLM = {
    "backend": "openai", "num_prompts": 40, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 8,
    "duration": 5.0, "completed": 40, "failed": 0, "total_input_tokens": 40000, "total_output_tokens": 4000,
    "request_throughput": 8.0, "output_throughput": 800.0, "mean_ttft_ms": 60.0, "median_ttft_ms": 50.0,
    "p99_ttft_ms": 200.0, "mean_tpot_ms": 6.0, "median_tpot_ms": 5.9, "p99_tpot_ms": 7.0,
}  # fmt: skip
SGLANG = {k: v for k, v in VLLM.items() if k != "num_prompts"} | {
    "backend": "sglang", "request_rate": 4.0, "max_concurrency": None, "mean_e2e_latency_ms": 700.0,
    "median_e2e_latency_ms": 690.0, "p99_e2e_latency_ms": 900.0,
}  # fmt: skip


def spread(mean: float) -> dict[str, Any]:
    return {"mean": mean, "median": mean, "percentiles": {"p50": mean, "p90": 1.2 * mean, "p99": 1.5 * mean}}


GUIDELLM = {
    "benchmarks": [
        {
            "config": {"strategy": {"type_": "concurrent", "streams": 8}},
            "metrics": {
                "request_totals": {"successful": 40, "errored": 0},
                "prompt_token_count": {"successful": spread(1000)}, "output_token_count": {"successful": spread(100)},
                "time_to_first_token_ms": {"successful": spread(60)},
                "inter_token_latency_ms": {"successful": spread(6)}, "request_latency": {"successful": spread(0.65)},
                "requests_per_second": {"successful": spread(8)},
                "output_tokens_per_second": {"successful": spread(800)},
            },
        }
    ]
}  # fmt: skip
AIPERF = {
    "request_count": {"unit": "requests", "avg": 40}, "request_throughput": {"unit": "requests/sec", "avg": 8.0},
    "time_to_first_token": {"unit": "ms", "avg": 60.0, "p50": 50.0, "p90": 80.0, "p99": 200.0},
    "inter_token_latency": {"unit": "ms", "avg": 6.0, "p50": 6.0}, "request_latency": {"unit": "ms", "avg": 650.0},
    "input_sequence_length": {"unit": "tokens", "avg": 1000.0},
    "output_sequence_length": {"unit": "tokens", "avg": 100.0},
    "input_config": {"loadgen": {"concurrency": 8}},
}  # fmt: skip
INFERENCE_PERF = {
    "load_summary": {"count": 40, "requested_rate": 4.0, "achieved_rate": 3.9},
    "successes": {
        "count": 40,
        "latency": {
            "request_latency": {"mean": 0.65, "median": 0.64, "p90": 0.7, "p99": 0.9},
            "time_to_first_token": {"mean": 0.06, "median": 0.05}, "time_per_output_token": {"mean": 0.006},
        },
        "throughput": {"requests_per_sec": 3.9, "output_tokens_per_sec": 390.0},
        "prompt_len": {"mean": 1000.0}, "output_len": {"mean": 100.0},
    },
    "failures": {"count": 0},
}  # fmt: skip
CSV = """arrival_s,prompt_tokens,output_tokens,ttft_s,tpot_s,e2e_s
0,1000,100,0.05,0.006,0.65
0.5,900,50,0.05,0.006,0.35
"""


def write(folder: Path, content: Any, name: str = "r.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "tool", "kind", "ttft"),
    [
        (VLLM, "vllm", "concurrency", 0.06), (json.dumps(SGLANG) + "\n", "sglang", "arrival_rate", 0.06),
        (GUIDELLM, "guidellm", "concurrency", 0.06), (AIPERF, "aiperf", "concurrency", 0.06),
        (INFERENCE_PERF, "inference-perf", "arrival_rate", 0.06), (CSV, "requests", "trace", 0.05),
    ],
)  # fmt: skip
def test_every_tool_is_read(tmp_path, content, tool, kind, ttft):
    (r,) = tool_results.read(write(tmp_path, content))
    assert (r.tool, r.kind) == (tool, kind) and r.measured["ttft_s"]["mean"] == pytest.approx(ttft)
    assert r.measured["tpot_s"]["mean"] == pytest.approx(0.006) and r.lengths[0] == (1000, 100)
    assert r.stated


def test_detailed_results_tell_every_request(tmp_path):
    detailed = VLLM | {
        "max_concurrency": None, "input_lens": [10, 30, 20], "output_lens": [3, 3, 3], "completed": 3,
        "ttfts": [0.1, 0.2, 0.3], "itls": [[0.01, 0.01]] * 3, "start_times": [5.0, 7.0, 6.0],
    }  # fmt: skip
    (r,) = tool_results.read(write(tmp_path, detailed))
    assert r.kind == "trace" and r.starts_s == [0.0, 1.0, 2.0] and r.lengths == [(10, 3), (20, 3), (30, 3)]
    assert r.measured["ttft_s"]["mean"] == pytest.approx(0.2) and r.measured["tpot_s"]["p99"] == pytest.approx(0.01)
    assert r.measured["e2e_s"]["mean"] == pytest.approx(0.22)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"hello": 1}, "a known tool"),
        ("[]", "no results"),
        ({k: v for k, v in VLLM.items() if "ttft" not in k and "tpot" not in k}, "vllm has no latency"),
        (VLLM | {"completed": 0}, "has no completed"),
        ({k: v for k, v in VLLM.items() if k != "total_input_tokens"}, "has no total_input_tokens"),
        ("prompt_tokens,output_tokens,ttft_s\n5,5,0.1\n", "has no arrival_s"),
        ("arrival_s,prompt_tokens,output_tokens,ttft_s\n0,5,5,soon\n", "ttft_s is 'soon'"),
        ("{not json\n", "is not valid JSON"),
        ({"benchmarks": [{"metrics": {"request_totals": {"successful": 3}}}]}, "guidellm's file has no token counts"),
    ],
)  # fmt: skip
def test_what_a_score_cannot_do_without_is_told_in_one_line(tmp_path, content, what):
    with pytest.raises(ServebookError, match=what) as caught:
        tool_results.read(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in content.items() if k not in keys}


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(json.dumps(VLLM).encode()),
        b"\xef\xbb\xbf" + json.dumps(VLLM).encode(),
        VLLM | {"max_concurrency": "8", "mean_ttft_ms": "60.0"},
        without(VLLM, "failed", "burstiness", "p99_ttft_ms", "p99_tpot_ms"),
        AIPERF | {"time_to_first_token": {"unit": "us", "avg": 6e4}, "inter_token_latency": {"unit": "s", "avg": 6e-3}},
        {"records": without(AIPERF, "input_config"), "input_config": {"stimulus": {"concurrency": 8}}},
        CSV.replace(",", ";").replace("\n", "\r\n"),
        CSV.replace("ttft_s,tpot_s,e2e_s", "ttft_ms,tpot_ms,e2e_ms").replace("0.05,0.006,0.", "50,6,"),
        CSV + "1,900,50,nan,NaN,\n",
    ],
)  # fmt: skip
def test_the_same_figures_in_any_wrapping(tmp_path, content):
    path = tmp_path / "r"
    path.write_bytes(
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    (r,) = tool_results.read(path)
    assert r.measured["ttft_s"]["mean"] == pytest.approx(0.06, rel=0.2)
    assert r.measured["tpot_s"]["mean"] == pytest.approx(0.006) and r.lengths[0] == (1000, 100)
    assert r.kind == ("trace" if r.tool == "requests" else "concurrency") and r.concurrency in (8, None)


DETAILED = VLLM | {
    "input_lens": [10, 30], "output_lens": [3, 3], "completed": 2, "ttfts": [0.1, 0.2], "itls": [[0.01, 0.01]] * 2,
    "request_throughput": 20.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "broken", [{"itls": [[0.01]]}, {"itls": [None, None]}, {"ttfts": ["x", "y"]}, {"itls": [[None], ["x"]]}]
)
def test_lists_that_are_not_of_every_request_leave_the_summary(tmp_path, broken):
    (r,) = tool_results.read(write(tmp_path, DETAILED | broken))
    assert r.measured["ttft_s"]["mean"] == pytest.approx(0.06)


def test_a_request_that_failed_is_in_no_latency(tmp_path):
    (r,) = tool_results.read(
        write(tmp_path, DETAILED | {"ttfts": [0.0, 0.2], "itls": [[], [0.01, 0.01]], "output_lens": [0, 3]})
    )
    assert r.measured["ttft_s"]["mean"] == pytest.approx(0.2) and r.measured["tpot_s"]["p99"] == pytest.approx(0.01)
    (r,) = tool_results.read(write(tmp_path, without(VLLM, "failed") | {"num_prompts": 50}))
    assert (r.failed, r.requests) == (10, 50)


REAL = json.loads((Path(__file__).parent / "data/tool_files.json").read_text())  # of real runs, shortened


def of_guidellm(content: dict[str, Any], latency: str) -> float:
    told = content["benchmarks"][0]["metrics"]
    return float(told["time_to_first_token_ms" if latency == "ttft_s" else "request_latency"]["successful"]["mean"])


def test_a_rate_beside_guidellm_s_limit_is_an_open_loop(tmp_path):
    (r,) = tool_results.read(write(tmp_path, REAL["guidellm_constant"]))
    assert (r.tool, r.kind, r.concurrency, r.rate_per_s, r.requests) == ("guidellm", "trace", None, 8.0, 6)
    assert [b - a for a, b in zip(r.starts_s, r.starts_s[1:], strict=False)] == pytest.approx([1 / 8] * 5, abs=0.03)
    assert len(set(r.lengths)) > 1 and r.lengths[0][0] > 300  # of every request, not the means
    assert 1e3 * r.measured["ttft_s"]["mean"] == pytest.approx(of_guidellm(REAL["guidellm_constant"], "ttft_s"))
    assert r.measured["e2e_s"]["mean"] == pytest.approx(of_guidellm(REAL["guidellm_constant"], "e2e_s"))
    (benchmark,) = REAL["guidellm_constant"]["benchmarks"]
    (r,) = tool_results.read(write(tmp_path, {"benchmarks": [without(benchmark, "requests")]}))
    assert (r.kind, r.arrivals, r.concurrency, r.rate_per_s) == ("arrival_rate", "constant", None, 8.0)
    few = benchmark | {"requests": {"successful": benchmark["requests"]["successful"][:2]}}  # with sample_size
    (r,) = tool_results.read(write(tmp_path, {"benchmarks": [few]}))
    assert (r.kind, len(r.lengths)) == ("arrival_rate", 1)


@pytest.mark.parametrize(("name", "limit"), [("guidellm_poisson_capped", 2), ("vllm_capped", 2)])
def test_under_a_limit_that_was_reached_requests_arrive_when_due(tmp_path, name, limit):
    (r,) = tool_results.read(write(tmp_path, REAL[name]))
    assert (r.kind, r.concurrency, r.rate_per_s, r.from_due) == ("trace", limit, 20.0, True)
    waits, sent = r.measured["ttft_s"]["mean"], REAL[name].get("mean_ttft_ms")
    assert waits > 1.2 * (of_guidellm(REAL[name], "ttft_s") if sent is None else sent) / 1e3
    assert r.starts_s[-1] < 0.8  # at 20 requests/s, however late they were sent


def test_requests_that_a_warm_up_sent_are_load_but_no_statistic(tmp_path):
    (benchmark,) = REAL["guidellm_constant"]["benchmarks"]
    second = sorted(r["info"]["timings"]["request_start"] for r in benchmark["requests"]["successful"])[3]
    begun = benchmark | {"scheduler_metrics": {"measure_start_time": second, "measure_end_time": second + 9}}
    begun["metrics"] = benchmark["metrics"] | {"request_totals": {"successful": 4}}
    (r,) = tool_results.read(write(tmp_path, {"benchmarks": [begun]}))
    assert r.requests == len(r.starts_s) == 6 and any("before or after the measured time" in t for t in r.stated)
    assert 1e3 * r.measured["ttft_s"]["mean"] != pytest.approx(of_guidellm(REAL["guidellm_constant"], "ttft_s"))


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def test_aiperf_s_load_is_its_measured_phase_and_its_list(tmp_path):
    told = REAL["aiperf_gamma"]
    summary = write(tmp_path, told, "profile_export_aiperf.json")
    (r,) = tool_results.read(summary)
    assert (r.kind, r.rate_per_s, r.concurrency, r.burstiness) == ("arrival_rate", 8.0, None, 2.0)
    assert len(r.lengths) == 1
    warm = {"metadata": {"benchmark_phase": "warmup"}, "metrics": {}}
    listed = write(tmp_path, lines([warm, *REAL["aiperf_gamma_requests"]]), "profile_export.jsonl")
    for path in (summary, listed):
        (r,) = tool_results.read(path)
        assert (r.kind, r.requests, len(set(r.lengths)) > 1) == ("trace", 6, True)
        for latency, name in (("ttft_s", "time_to_first_token"), ("tpot_s", "inter_token_latency")):
            for of, key in (("mean", "avg"), ("p50", "p50"), ("p99", "p99")):
                assert 1e3 * r.measured[latency][of] == pytest.approx(told[name][key])
    warmup = {"kind": "warmup", "type": "concurrency", "concurrency": 4}
    loads = {
        (8, None, "concurrency"): {"type": "concurrency", "concurrency": 8},
        (3, 12.0, "arrival_rate"): {"type": "constant", "rate": 12.0, "concurrency": 3},
    }
    for (concurrency, rate, kind), phase in loads.items():
        phases = {"phases": [warmup, {"kind": "profiling", **phase}]}
        (r,) = tool_results.read(write(tmp_path, AIPERF | {"input_config": phases}))
        assert (r.concurrency, r.rate_per_s, r.kind) == (concurrency, rate, kind)


def test_a_limit_that_was_never_reached_is_none(tmp_path):
    phase = {"type": "poisson", "rate": 8.0, "concurrency": 50}
    told = REAL["aiperf_gamma"] | {"input_config": {"phases": [phase]}}
    write(tmp_path, lines(REAL["aiperf_gamma_requests"]), "r.jsonl")
    (r,) = tool_results.read(write(tmp_path, told, "r_aiperf.json"))
    assert (r.kind, r.concurrency) == ("trace", None) and any("below the limit of 50" in t for t in r.stated)


def test_requests_of_one_token_count_in_vllm_s_ttft(tmp_path):
    single = DETAILED | {"output_lens": [1, 3], "itls": [[], [0.01, 0.01]]}
    (r,) = tool_results.read(write(tmp_path, single))
    assert r.measured["ttft_s"]["mean"] == pytest.approx(0.15) and r.measured["tpot_s"]["mean"] == pytest.approx(0.01)


def test_each_stage_of_inference_perf_has_its_requests_out_of_one_list(tmp_path):
    write(tmp_path, REAL["inference_perf_requests"], "per_request_lifecycle_metrics.json")
    found = []
    for stage in ("inference_perf_stage_0", "inference_perf_stage_1"):
        (r,) = tool_results.read(write(tmp_path, REAL[stage], f"{stage}.json"))
        assert (r.kind, r.requests, r.concurrency) == ("trace", REAL[stage]["successes"]["count"], None)
        assert len(set(r.lengths)) > 1 and r.starts_s[-1] == pytest.approx(REAL[stage]["load_summary"]["send_duration"])
        told = REAL[stage]["successes"]["latency"]
        for latency, name in (("ttft_s", "time_to_first_token"), ("e2e_s", "request_latency")):
            assert r.measured[latency]["mean"] == pytest.approx(told[name]["mean"])
            assert r.measured[latency]["p99"] == pytest.approx(told[name]["p99"])
        assert r.measured["tpot_s"]["p90"] == pytest.approx(told["time_per_output_token"]["p90"])
        found.append(r.starts_s)
    assert found[0] != found[1]
    other = REAL["inference_perf_stage_0"] | {
        "load_summary": {"count": 3, "send_duration": 99.0, "requested_rate": 8.0}
    }
    (r,) = tool_results.read(write(tmp_path, other))  # the list of another run
    assert r.kind == "arrival_rate" and any("equal gaps" in a for a in r.assumed)


def test_newer_inference_perf_files_count_tokens_under_another_name(tmp_path):
    good = without(INFERENCE_PERF["successes"], "prompt_len") | {"prompt_tokens": {"total": 4e4, "mean": 1000.0}}
    (r,) = tool_results.read(write(tmp_path, INFERENCE_PERF | {"successes": good}))
    assert r.lengths == [(1000, 100)]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", lines(REAL["aiperf_gamma_requests"]), "Put a_aiperf.json of the same run beside it"),
        ("a.yaml", "benchmarks:\n- config:\n    x: 1\n", "guidellm's YAML cannot be read. Give the JSON file"),
        ("a.csv", "Metric,avg,min\nx,1,2\n", "aiperf's CSV cannot be read. Give the JSON file"),
        ("a.csv", "Run Info,Run Info\nx,1\n", "guidellm's CSV cannot be read. Give the JSON file"),
        ("a.json", VLLM | {"ramp_up_strategy": "linear", "ramp_up_start_rps": 4, "ramp_up_end_rps": 20}, "a schedule"),
        ("a.json", AIPERF | {"input_config": {"phases": [{"type": "fixed_schedule"}]}}, "a schedule"),
        ("a.json", AIPERF | {"input_config": {"phases": [{"type": "poisson", "rate": 8}] * 2}}, "2 phases as one"),
        ("benchmarks.json/x.json", GUIDELLM, "is a folder. Give one of its files, such as x.json"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_scored_says_which_one_can(tmp_path, name, content, what):
    path = tmp_path / name.split("/")[0]
    if "/" in name:
        path.mkdir()
    write(tmp_path, content, name)
    with pytest.raises(ServebookError) as caught:
        tool_results.read(path)
    assert what in str(caught.value) and "\n" not in str(caught.value)


def test_a_cap_on_what_is_in_flight_is_a_closed_loop(tmp_path):
    capped = {
        "benchmarks": [
            GUIDELLM["benchmarks"][0] | {"config": {"strategy": {"type_": "throughput", "max_concurrency": 8}}}
        ]
    }
    (r,) = tool_results.read(write(tmp_path, capped))
    assert (r.kind, r.concurrency) == ("concurrency", 8)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (VLLM | {"mean_ttft_ms": -5}, "ttft_s mean is -0.005"),
        (VLLM | {"mean_ttft_ms": 0.06, "mean_tpot_ms": 0.006}, "rate times latency is 0.0052 requests in flight"),
        (CSV.replace("0.05", "50"), "a mean TTFT of 50 s is longer"),
        (CSV.replace("0.05", "inf", 1), "line 2: ttft_s is 'inf'"),
        (CSV.replace("1000", "0", 1), "line 2: prompt_tokens is '0'"),
        (CSV.replace("1000", "9.5", 1), "line 2: prompt_tokens is '9.5'"),
        (CSV.replace("tpot_s", "ttft_s"), "has the column ttft_s twice"),
        (VLLM | {"completed": 10**400}, "has no completed"),
        (VLLM | {"completed": 10**12}, "completed is 1e+12"),
        (DETAILED | {"input_lens": [10, 1e30]}, "a request has 1e+30 tokens"),
        (AIPERF | {"request_latency": {"unit": "fortnights", "avg": 1.0}}, "has the unit 'fortnights'"),
        (without(AIPERF, "input_config"), "no concurrency and no rate"),
        ({"benchmarks": [None]}, "has no metrics"),
        (INFERENCE_PERF | {"load_summary": 5}, "inference-perf's file has no rate"),
        (INFERENCE_PERF | {"successes": {**INFERENCE_PERF["successes"], "latency": [1]}}, "has no latency"),
        ("[" * 100_000, "is not valid JSON"),
        ([[VLLM]], "has no column prompt_tokens"),
    ],
)  # fmt: skip
def test_figures_that_cannot_be_true_are_refused_in_one_line(tmp_path, content, what):
    with pytest.raises(ServebookError) as caught:
        tool_results.read(write(tmp_path, content))
    assert what in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_scores_and_makes_a_page(tmp_path, capsys):
    params, results = write(tmp_path, PARAMS, "p.yaml"), write(tmp_path, VLLM)
    assert cli.main(["score", str(params), "--measured", str(results)]) == 0
    said = capsys.readouterr().out
    assert "40 requests answered, all at once, at most 8 in flight" in said
    assert "every request of the mean length" in said
    assert "TTFT p99 ms" in said and "The largest gap is" in said and "end to end" not in said.split("The largest")[0]
    assert cli.main(["score", str(params), "--measured", str(results), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[0]["rows"]
    assert {r["statistic"] for r in rows if r["metric"] == "ttft_s"} == {"mean", "p50", "p99"}
    page = tmp_path / "score.html"
    assert cli.main(["score", str(params), "--measured", str(results), "--html", str(page)]) == 0
    assert "Predicted against measured, per percentile" in page.read_text() and "TPOT p50" in page.read_text()
    capsys.readouterr()
    assert cli.main(["score", str(params), "--measured", str(results), "--workload", "none"]) == 1
    assert "there is no workload 'none'" in capsys.readouterr().err


def test_a_much_slower_server_is_told_with_its_cause(tmp_path, capsys):
    slow = VLLM | {"mean_tpot_ms": 30.0, "median_tpot_ms": 30.0, "p99_tpot_ms": 40.0}
    params, results = write(tmp_path, PARAMS, "p.yaml"), write(tmp_path, slow)
    assert cli.main(["score", str(params), "--measured", str(results)]) == 0
    said = capsys.readouterr().out
    assert "measured slower than predicted" in said and "reading weights" in said


def test_what_prompts_share_comes_from_the_parameters(tmp_path, capsys):
    shared = (
        PARAMS
        + """
workloads: {shared: {prompt_tokens: "900:1100", output_tokens: 100, shared_prefix: {tokens: 800}}}
sweeps: {s: {kind: concurrency, workload: shared, concurrency: [8]}}
"""
    )
    results = write(tmp_path, VLLM)
    found = []
    for more in ([], ["--workload", "shared"]):
        file = write(tmp_path, shared, "s.yaml")
        assert cli.main(["score", str(file), "--measured", str(results), "--json", *more]) == 0
        rows = json.loads(capsys.readouterr().out)[0]["rows"]
        found.append(next(r["predicted"] for r in rows if (r["metric"], r["statistic"]) == ("ttft_s", "mean")))
    assert found[1] < 0.8 * found[0]
