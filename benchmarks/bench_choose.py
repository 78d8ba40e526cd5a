"""How fast `servebook choose` searches, whether it repeats itself, and whether it orders other people's set-ups right.

    python benchmarks/bench_choose.py [--speed] [--public] [--data DIR] [--pairs] [--flags] [--probabilities]

--speed: a search of at least 500 set-ups of a workload with spread lengths, in a process of its own: seconds, CPU
seconds, peak memory; twice, and the answers must be equal. --public: the rows of a table of published points (default:
outputs/published/public) that share source, model and load and differ in their set-up, in pairs: how often the better
one by the cost of an output token at list prices (what choose decides by), output rate, TPOT and TTFT is named right,
from the datasheet alone, where the measured ones differ by over 10 %; --pairs lists those named wrong. --flags: vLLM's
own parser reads the command of every set-up of two searches (one of a mixture of experts) and must find in it what was
searched. --probabilities: for levels to which the judgement of a choice gives a probability of 10 to 90 %, how often
what was measured meets them: means or medians of TTFT and TPOT of the table's rows, and the p90 of closed loops of the
kept H200 runs, from which the predictor has learned. Without a choice the first two. The bars: 60 s on two cores, 500
MB, 90 % of the pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import public_points
from bench_public import MOST, OWN, Bench
from public_points import Row
from servebook.common import stats
from servebook.common.measured_point import MeasuredPoint
from servebook.config import params
from servebook.config.params import VllmEngine
from servebook.hardware.prices import list_prices
from servebook.predictor import server_limits
from servebook.predictor.calibration import calibrate
from servebook.predictor.choice_answer import answer
from servebook.predictor.choice_search import DRAWS
from servebook.predictor.forecaster import Forecaster
from servebook.predictor.intervals import form_error
from servebook.predictor.target_load import FORM, Target, chance, judge
from servebook.run import choice_files
from servebook.run.book import Book
from servebook.run.choice_measured import RARE
from servebook.run.choosing import choice_for
from servebook.run_folder.stored_run import StoredRun

BAR_S, BAR_MB, BAR_SHARE, LEAST, TIE = 60.0, 500.0, 0.9, 0.10, 0.05
KEPT = Path(__file__).parents[1] / "outputs" / "reference"
REQUESTS = 600  # of a simulated row
STATED, SURE = (0.1, 0.3, 0.5, 0.7, 0.9), 0.1  # probabilities; how far off the last may be over public points
LOAD = (
    "source", "load", "concurrency", "rate_per_s", "num_prompts", "prompt_tokens", "output_tokens", "lengths",
    "hit_share", "stat",
)  # fmt: skip
QUANTIZED = r"-(fp8|awq|gptq|w4a16|int8|int4|nvfp4)$"  # how the table names a model's quantized checkpoint
QUESTION = """
run: bench
title: A chat on three cards
model: {config: qwen2.5-7b, weights: dummy}
hardware: {gpu: H200}
engines: {vllm: {kind: vllm}}
workloads:
  chat: {prompt_tokens: "lognormal:800,600,32,4000", output_tokens: "lognormal:250,200,8,2000"}
slo: {ttft_s: 0.5, ttft_percentile: 99, tpot_s: 0.03, target: {rate_per_s: 40, workload: chat}}
choose:
  gpus: {H200: 4.59, H100-SXM: 3.99, L40S: 1.95}
  max_gpus: 8
  tensor_parallel_size: [1, 2, 4]
"""


def search() -> int:
    """One search, its cost as JSON on standard output."""
    began, cpu = time.perf_counter(), time.process_time()
    choice = choice_for(StoredRun(params.read_text(QUESTION), Path("nowhere"), Path()), "bench")
    found = answer(choice)
    used = {
        "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "answer": found,
    }  # fmt: skip
    print(json.dumps(used))
    return 0


def speed() -> bool:
    """Two searches, each in a process of its own."""
    runs = []
    for _ in range(2):
        load = os.getloadavg()[0]
        done = subprocess.run([sys.executable, __file__, "--one"], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout) | {"load": load})
    found = runs[0]["answer"]
    chosen = found["chosen"]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(
        f"{found['searched']} set-ups, {found['fit']} fit, {found['simulated']} simulations, {found['judged']} judged"
    )
    print(
        f"choice: {chosen['replicas']} × {chosen['name']}, {chosen['cost_per_hour']:.2f}/h, {chosen['probability']:.0%}"
    )
    for r in runs:
        busy = f"load average {r['load']:.1f}"
        print(f"{r['seconds']:.1f} s, {r['cpu_s']:.1f} s of one core, peak {r['peak_mb']:.0f} MB ({busy})")
    same = runs[0]["answer"] == runs[1]["answer"]
    print("the same answer twice" if same else "NOT the same answer twice")
    good = same and found["searched"] >= 500
    return good and all(min(r["seconds"], r["cpu_s"]) <= BAR_S and r["peak_mb"] < BAR_MB for r in runs)


def flags() -> bool:
    """Every set-up's command through vLLM's own parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, read, wrong = make_arg_parser(FlexibleArgumentParser()), 0, []
    for text in (QUESTION, QUESTION.replace("qwen2.5-7b", "qwen3-30b-a3b").replace("[1, 2, 4]", "[1, 2]")):
        choice = choice_for(StoredRun(params.read_text(text), Path("nowhere"), Path()), "bench")
        for c in choice.candidates:
            _, _, model, *rest = shlex.split(choice_files.serve_command(choice, c.set_up))
            said = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *rest]))
            wanted = {k: v for k, v in c.set_up.as_dict().items() if hasattr(said, k) and k != "max_model_len"}
            wanted |= {"enable_prefix_caching": c.set_up.engine.prefix_caching}
            read += 1
            wrong += [f"{c.set_up.name}: {k}" for k, v in wanted.items() if getattr(said, k) != v]
    print(f"{read} commands read by vLLM's parser, {len(wrong)} of another set-up", *wrong[:5], sep="\n  ")
    return not wrong


def probabilities(folder: Path) -> bool:
    """How often levels are met, by the probability that a judgement gives to meeting them."""
    print("stated        " + "".join(f"{q:>7.0%}" for q in STATED))
    good = True
    for where, found in (("public", _published(folder)), ("kept", _kept())):
        for latency, chances in found.items():
            # the level of probability q is met by what lies within the limit whose chance is q
            met = [sum(u <= q for u in chances) / max(len(chances), 1) for q in STATED]
            print(f"{where:<7}{latency:<7}" + "".join(f"{share:>7.0%}" for share in met) + f"   of {len(chances)}")
            if where == "public":
                good &= abs(met[-1] - STATED[-1]) <= SURE
            else:
                good &= sum(not RARE < u < 1 - RARE for u in chances) <= 2 * RARE * len(chances)
    return good


def _published(folder: Path) -> dict[str, list[float]]:
    """The probability, from the datasheet, of staying below what each row of a table measured."""
    found: dict[str, list[float]] = {"ttft_s": [], "tpot_s": []}
    known = public_points.sources(folder, OWN)
    for members in public_points.setups(public_points.read(folder, known)).values():
        bench = Bench(members, folder, known)
        for row, server in bench.usable:
            learned = bench.prior(row, server)
            try:
                drawn = [
                    bench.predict(row, server, server.times(c), 2 + i, MOST)
                    for i, c in enumerate(learned.samples(DRAWS, 1))
                ]
            except (ValueError, ArithmeticError):
                continue
            for latency, chances in found.items():
                metric = latency.removesuffix("_s")
                if metric in row.measured:
                    form = form_error(FORM[latency], learned.stage)
                    chances.append(chance([d[metric] for d in drawn], row.measured[metric], form))
    return found


def _kept() -> dict[str, list[float]]:
    """The probability of staying below the p90 that each closed loop of the kept runs measured."""
    found: dict[str, list[float]] = {"ttft_s": [], "tpot_s": []}
    with tempfile.TemporaryDirectory() as scratch:
        for bundle in sorted(KEPT.glob("blind-*.tar.xz")):
            with tarfile.open(bundle) as tar:
                tar.extractall(scratch, filter="data")
        for path in sorted([*KEPT.glob("*/params.yaml"), *Path(scratch).glob("*/params.yaml")]):
            _judged(Book.at(path.parent), found)
    return found


def _judged(book: Book, found: dict[str, list[float]]) -> None:
    """Add what a judgement from the datasheet says of one run's closed loops of vLLM with at least four clients."""
    for name, engine in book.params.engines.items():
        if isinstance(engine, VllmEngine):
            _judged_engine(book, name, engine, found)


def _judged_engine(book: Book, name: str, engine: VllmEngine, found: dict[str, list[float]]) -> None:
    p = book.params
    at = server_limits.server(name, engine, book.shape, book.gpu)
    learned = calibrate(name, at.shape, at.gpu, layout=at.layout)
    f = Forecaster(at, learned, p.load.model_copy(update={"max_seconds": 1e6}), DRAWS, p.load.seed)
    for point in book.stored_points():
        clients = point.concurrency or 1
        if point.engine != name or point.kind != "concurrency" or point.verdict == "invalid":
            continue
        if clients < 4 or (point.requests or 0) < 20:
            continue
        spec = next(s for s in p.sweep_points(point.sweep, name) if s.point == point.point_id)
        lengths = spec.prompt_tokens, spec.output_tokens
        load = Target(*lengths, spec.workload, spec.workload_name or "", users=clients, seed=p.load.seed)
        limits = {latency: (value, 90.0) for latency, value in _p90(book, point).items() if value}
        judged = judge(f, load, 1, limits, running=clients, requests=max(150, min(600, 2 * clients)))
        if judged is not None:
            for latency, chance in judged.by_limit.items():
                found[latency].append(chance)


def _p90(book: Book, point: MeasuredPoint) -> dict[str, float | None]:
    """The p90 of a point's TTFT and TPOT; points of November 2026 hold none of TPOT, which their requests have."""
    if point.tpot_p90_s is not None:
        return {"ttft_s": point.ttft_p90_s, "tpot_s": point.tpot_p90_s}
    rows = book.requests(point.sweep)
    rows = rows[(rows["engine"] == point.engine) & (rows["point"] == point.point_id) & (rows["phase"] == "measured")]
    rows = rows[rows["ok"].astype(bool)]
    return {m: stats.percentile(rows[m].dropna().to_numpy(float), 90.0) for m in ("ttft_s", "tpot_s")}


def public(folder: Path, show: bool) -> bool:
    """The pairs of a table of published points."""
    known = public_points.sources(folder, OWN)
    rows = public_points.read(folder, known)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        public_points.take_figures(row)
        if row.measured:
            model = re.sub(QUANTIZED, "", row.cells.get("model", ""))
            groups.setdefault((model, *(row.cells.get(k, "") for k in LOAD)), []).append(row)
    right: dict[str, list[bool]] = {"cost": [], "output": [], "tpot": [], "ttft": []}
    equal: dict[str, int] = dict.fromkeys(right, 0)
    for members in groups.values():
        if len({_set_up(row) for row in members}) > 1:
            _pairs(members, folder, known, right, equal, show)
    total = [ok for found in right.values() for ok in found]
    for metric, found in right.items():
        share = sum(found) / len(found) if found else 0.0
        ties = f"; {equal[metric]} of the wrong ones predicted within {TIE:.0%} of each other"
        print(f"{metric:<8}{len(found):>6} pairs that differ by over {LEAST:.0%}, {share:.1%} named right{ties}")
    share = sum(total) / len(total) if total else 0.0
    print(f"{'all':<8}{len(total):>6} pairs, {share:.1%} named right (bar {BAR_SHARE:.0%})")
    return bool(total) and share >= BAR_SHARE


def _rate(row: Row, figures: Mapping[str, float], measured: Mapping[str, float]) -> float | None:
    """Output tokens/s: where the row has them, else by Little's law from the latencies of a closed loop's clients."""
    if "output" in measured:
        return figures["output"]
    clients, tokens = row.number("concurrency"), row.number("output_tokens")
    if row.cells.get("load") != "closed" or not clients or not tokens or not {"ttft", "tpot"} <= set(measured):
        return None
    return clients * tokens / (figures["ttft"] + (tokens - 1) * figures["tpot"])


def _set_up(row: Row) -> tuple[str, ...]:
    return row.setup + tuple(row.cells.get(k, "") for k in ("max_num_seqs", "max_num_batched_tokens"))


def _pairs(
    members: Sequence[Row],
    folder: Path,
    known: Mapping[str, Mapping[str, Any]],
    right: dict[str, list[bool]],
    equal: dict[str, int],
    show: bool,
) -> None:
    """The pairs of one load, each set-up predicted once."""
    prices = list_prices()
    bench = Bench(members, folder, known)
    predicted = []
    for row, server in bench.usable:
        try:
            times = server.times(bench.prior(row, server).constants)
            said = bench.predict(row, server, times, 1, REQUESTS)
        except (ValueError, ArithmeticError):
            continue
        cards, price = (row.whole("tp", 1) or 1) * (row.whole("dp", 1) or 1), prices.get(server.gpu.name)
        measured = dict(row.measured)
        if price is not None:
            for figures in (measured, said):
                if rate := _rate(row, figures, measured):
                    figures["cost"] = cards * price.usd_per_hour / rate
        predicted.append((row, said, measured))
    for (a, of_a, was_a), (b, of_b, was_b) in itertools.combinations(predicted, 2):
        if _set_up(a) == _set_up(b):
            continue
        for metric, found in right.items():
            if metric not in was_a or metric not in was_b:
                continue
            ratio = was_a[metric] / was_b[metric]
            if max(ratio, 1 / ratio) <= 1 + LEAST:
                continue
            said_ratio = of_a[metric] / of_b[metric] if of_b[metric] > 0 else 1.0
            found.append((said_ratio > 1) == (ratio > 1))
            equal[metric] += not found[-1] and abs(said_ratio - 1) <= TIE
            if show and not found[-1]:
                print(f"  {metric} measured {ratio:.2f}, predicted {said_ratio:.2f}: {a.name} against {b.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--public", action="store_true")
    parser.add_argument("--data", type=Path, default=OWN, metavar="DIR")
    parser.add_argument("--pairs", action="store_true", help="list the pairs that are named wrong")
    parser.add_argument("--flags", action="store_true", help="read every command with vLLM's parser")
    parser.add_argument("--probabilities", action="store_true", help="how often levels are met, by what was stated")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return search()
    both = not (options.speed or options.public or options.flags or options.probabilities)
    good = True
    if options.flags:
        good &= flags()
    if options.probabilities:
        good &= probabilities(options.data)
    if options.speed or both:
        good &= speed()
    if options.public or both:
        good &= public(options.data, options.pairs)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
