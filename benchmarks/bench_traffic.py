"""How well traffic is predicted from the datasheet alone, and how fast: python benchmarks/bench_traffic.py [--quick].

Scores the traces and results in benchmarks/traffic/ (see its README), simulates 10,000 requests and (without --quick) a
million in a process of their own, and replays 200 requests/s against the mock server of the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from servebook.config import params, request_plan
from servebook.config.params import ModelParams, VllmEngine
from servebook.config.points import PointSpec
from servebook.config.traces import Trace
from servebook.config.workloads import Workload
from servebook.hardware import catalog
from servebook.model.reader import read_shape
from servebook.predictor.any_load import predict_load
from servebook.predictor.forecaster import forecaster
from servebook.predictor.predict import predict_run
from servebook.predictor.scenario import Scenario
from servebook.scoring import tool_results
from servebook.scoring.tool_scores import score_result

HERE = Path(__file__).parent / "traffic"
STATISTICS = ("mean", "p50", "p90", "p99")


def percent(error: float) -> str:
    return f"{100 * error:+.1f}"


def trace() -> None:
    """The replayed trace of the RTX PRO 6000."""
    p = params.read_file(HERE / "rtxpro6000-llama-3.1-8b.yaml")
    point = predict_run(p, read_shape(p.model, HERE), catalog.resolve(p.hardware))["points"][0]
    (result,) = tool_results.read(HERE / "rtxpro6000-llama-3.1-8b.csv")
    print("RTX PRO 6000 trace, error in % of mean, p50, p90, p99")
    for latency, seen in result.measured.items():
        spans = {"mean": point["metrics"][latency], **point["percentiles"][latency]}
        print(f"  {latency:7}", *(f"{percent(spans[s]['value'] / seen[s] - 1):>7}" for s in STATISTICS))


def tools() -> None:
    """The results of vllm bench serve on an H200."""
    p = params.read_file(HERE / "h200-mistral-7b.yaml")
    shape, gpu = read_shape(p.model, HERE), catalog.resolve(p.hardware)
    print("vllm bench serve on an H200 through servebook score, error in % of mean, p50, p90, p99")
    for name in ("c64", "burst200", "rate12", "prefix"):
        (result,) = tool_results.read(HERE / f"vllm-bench-h200-{name}.json")
        score = score_result(p, shape, gpu, "vllm", result, p.workloads["prefix"] if name == "prefix" else None)
        for latency in ("ttft_s", "tpot_s", "e2e_s"):
            rows = [r for r in score.rows if r.metric == latency]
            print(f"  {name:9}{latency:7}", *(f"{percent(r.error):>7}" for r in rows))


def stages() -> None:
    """inference-perf's stages on H100s: prompts that repeat, dense models."""
    folders = {"Llama-2-7b-hf": "meta-llama--Llama-2-7b", "Llama-2-70b-hf": "meta-llama--Llama-2-70b"}
    folders["CodeLlama-34b-Instruct-hf"] = "codellama--CodeLlama-34b"
    gpu, errors = catalog.catalog()["H100-SXM"], []
    print("inference-perf stages on H100 SXM, error in % of mean TTFT, TPOT, end to end")
    for s in json.loads((HERE / "h100-stages.json").read_text()):
        if s["model"] not in folders:
            continue
        model = ModelParams(path=str(HERE / "models" / folders[s["model"]]), weights="dummy", dtype="float16")
        engine = VllmEngine(
            kind="vllm", max_num_seqs=128, max_num_batched_tokens=2048, tensor_parallel_size=s["tp"]
        )  # fmt: skip
        workload = Workload(
            prompt_tokens=round(s["prompt"]), output_tokens=s["output"], unique_prompts=s["unique"],
            shared_prefix={"tokens": s["system"], "groups": 9},
        )  # fmt: skip
        point = predict_load(
            read_shape(model, HERE), gpu, engine, workload, rate_per_s=float(s["rate"]), arrivals="constant",
            requests=min(s["n"], 3000), samples=0, text=True,
        )  # fmt: skip
        seen = {"ttft_s": s["ttft"], "tpot_s": s["tpot"], "e2e_s": s["e2e"]}
        errors.append([point["metrics"][k]["value"] / v - 1 for k, v in seen.items()])
        print(
            f"  {s['exp'][16:42]:27}{s['rate']:>3}/s",
            *(f"{percent(e):>7}" for e in errors[-1]),
            f"hits {point['hit_share']:.0%}",
        )
    print("  mean absolute", *(f"{100 * e:>7.1f}" for e in np.abs(errors).mean(0)))


def large(count: int) -> tuple[float, float, float]:
    """(seconds of a core, peak MB of the process, MB before) of one simulation of so many requests of a trace."""
    rng = np.random.default_rng(1)
    starts = np.cumsum(rng.exponential(1 / 8, count))
    prompts, outputs = rng.integers(100, 2000, count), rng.integers(20, 600, count)
    rows = Trace(starts, prompts, outputs, np.full(count, -1), [()] * count, True, "")
    p = params.read_file(HERE / "rtxpro6000-llama-3.1-8b.yaml")
    f = forecaster(p, "vllm", read_shape(p.model, HERE), catalog.resolve(p.hardware), samples=0)
    spec = PointSpec("s", "vllm", "p", "trace", 1000, 300, workload=Workload.of_rows(rows), requests=count)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time()
    result = Scenario(f.server, spec, p.load).simulate(f.best)
    assert len(result.measured) == count
    return time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, before


def speed(counts: list[int]) -> None:
    """Time and memory of large traces."""
    for count in counts:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            seconds, peak, before = pool.apply(large, (count,))
        took = f"{seconds:.1f} s of a core, peak {peak:.0f} MB (before {before:.0f})"
        print(f"{count:,} requests of a trace simulated: {took}")


def replay() -> None:
    """200 requests/s from a trace against the mock server: how late each was sent."""
    from servebook.config.params import Load, Slo
    from servebook.engines import ports
    from servebook.load import measure_point_sync

    count, rng = 2000, np.random.default_rng(2)
    starts = np.cumsum(rng.exponential(1 / 200, count))
    rows = Trace(
        starts, rng.integers(100, 1000, count), rng.integers(4, 16, count), np.full(count, -1), [()] * count, True, ""
    )
    spec = PointSpec("s", "mock", "p", "trace", 500, 8, workload=Workload.of_rows(rows), requests=count)
    assert len(request_plan.due_times(spec, Load(), count)) == count
    port = ports.free_port()
    mock = [sys.executable, str(HERE.parents[1] / "tests" / "mock_server.py"), "--port", str(port)]
    with subprocess.Popen(mock, stdout=subprocess.DEVNULL) as server:
        try:
            while ports.is_free(port):
                time.sleep(0.1)
            options: dict[str, Any] = {"run_dir": None, "load": Load(), "slo": Slo(), "batching": True}
            url = f"http://127.0.0.1:{port}"
            point = measure_point_sync(spec, url=url, model="mock", vocab=range(100, 1000), **options)
        finally:
            server.terminate()
    assert point.schedule_lag_p50_s is not None and point.schedule_lag_p99_s is not None
    late = [1e3 * s for s in (point.schedule_lag_p50_s, point.schedule_lag_p99_s)]
    busy = (point.client_cpu_s or 0.0) / (point.seconds or 1.0)
    told = f"sent late by {late[0]:.2f} ms (p50), {late[1]:.2f} ms (p99), the client at {busy:.0%} of a core"
    print(f"200 requests/s replayed: {point.requests} answered, {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the million requests")
    options = parser.parse_args()
    trace()
    tools()
    stages()
    speed([10_000] if options.quick else [10_000, 1_000_000])
    replay()


if __name__ == "__main__":
    main()
