"""The predictor's bars: accuracy on the two public tables and the kept runs, sensitivity, cross-validation, speed.

    python benchmarks/bench_predictor.py [--quick]

Accuracy is deterministic. `--quick` leaves out the sensitivity and cross-validation tables.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from servebook.common.predicted_point import holds
from servebook.config import params
from servebook.config.params import ModelParams
from servebook.config.points import PointSpec
from servebook.hardware import catalog as hardware
from servebook.model import reader as model
from servebook.predictor import forecaster, predict, simulation
from servebook.predictor.calibration import calibrate
from servebook.predictor.priors import Prior, vllm_priors
from servebook.predictor.scenario import Scenario, average, whole_rounds
from servebook.predictor.scheduler import SchedulerConfig
from servebook.predictor.server_limits import server
from servebook.predictor.simulated_clients import Prompt, Traffic
from servebook.predictor.steptime import VllmTimes
from servebook.run_folder import results
from servebook.run_folder.published import read as read_published
from servebook.scoring import peers, standing

ROOT = Path(__file__).parents[1]
RUNS = {"A40": ("a40-qwen2.5-7b", "qwen2.5-7b"), "A100": ("a100-qwen3-8b", "qwen3-8b")}
# TTFT, TPOT and decode rate at C = 2 … 32; aggregate at C = 16, 64, 128 and TPOT at 64, 128
SCORED = {
    "A40": [(c, m) for c in (2, 4, 8, 16, 32) for m in ("ttft_s", "tpot_s", "decode_tok_per_s")],
    "A100": [*((c, "output_tok_per_s") for c in (16, 64, 128)), *((c, "tpot_s") for c in (64, 128))],
}
SWEEP = {"A40": "long_prompts", "A100": "short_prompts"}


Errors = dict[tuple[int, str], float]  # (C, metric): predicted / measured − 1


class Table:
    """One public table: its run, measured rows, facts; predicts its scored cells for given priors."""

    def __init__(self, name: str) -> None:
        run, shape = RUNS[name]
        self.name = name
        self.params = params.read_file(ROOT / "params" / f"{run}.yaml")
        self.shape = model.read_shape(ModelParams(config=shape, weights="dummy"), ROOT)
        self.gpu = hardware.resolve(self.params.hardware)
        self.rows, self.facts = read_published(ROOT / "outputs" / "published" / f"{run}.csv")
        self.own = [r for r in self.rows if r.engine == "vllm"]
        self.alone = {(r.prompt_tokens, r.output_tokens): r for r in self.own if r.concurrency == 1}

    def priors(self) -> dict[str, Prior]:
        return vllm_priors(self.shape, self.gpu, self.facts["engines"]["vllm"])

    def errors(self, priors: dict[str, Prior] | None = None, jitter_s: float | None = None) -> Errors:
        """predicted / measured − 1 of every scored cell, constants from the C = 1 points only."""
        s = server("vllm", self.params.engines["vllm"], self.shape, self.gpu, self.facts["engines"]["vllm"])
        c = calibrate(
            "vllm", self.shape, self.gpu, list(self.alone.values()), facts=self.facts["engines"]["vllm"],
            budget=s.config.max_num_batched_tokens, priors=priors or self.priors(),
        )  # fmt: skip
        if jitter_s is None:
            jitter_s = 0.0 if self.name == "A100" else predict.PUBLISHED_JITTER_S
        load = self.params.load.model_copy(update={"jitter_s": jitter_s})
        times, out = VllmTimes(self.shape, self.gpu, c.constants), {}
        for concurrency in dict.fromkeys(c for c, _ in SCORED[self.name]):
            row = next(r for r in self.own if r.concurrency == concurrency and r.sweep == SWEEP[self.name])
            tokens = row.prompt_tokens, row.output_tokens
            spec = PointSpec(row.sweep, "vllm", row.point_id, "concurrency", *tokens, concurrency)
            scenario = Scenario(s, spec, load, row.cache_hit_share or 0.0, running_gauge=True)
            count = whole_rounds(max(120, 3 * concurrency), concurrency)
            o = average([scenario.outcome(times, seed, count) for seed in forecaster.SEEDS[:2]])
            for at, metric in SCORED[self.name]:
                measured = row.measured(metric)
                if at == concurrency:
                    out[at, metric] = getattr(o, metric) / measured - 1
        return out


def mean_abs(errors: Errors, metric: str | None = None) -> float:
    values = [abs(e) for (_, m), e in errors.items() if metric in (None, m)]
    return sum(values) / len(values)


def summary(table: Table, errors: Errors) -> str:
    if table.name == "A100":
        return f"{100 * mean_abs(errors):5.1f} %"
    return " / ".join(f"{100 * mean_abs(errors, m):.1f}" for m in ("ttft_s", "tpot_s", "decode_tok_per_s")) + " %"


def accuracy(tables: list[Table]) -> None:
    print("\nAccuracy, constants from C = 1 points only, one set of priors (error, %)")
    for t in tables:
        errors = t.errors()
        for c in dict.fromkeys(c for c, _ in errors):
            cells = [f"{m} {100 * e:+.1f}" for (at, m), e in errors.items() if at == c]
            print(f"  {t.name} C={c:<4d} {'  '.join(cells)}")
        print(f"  {t.name} mean absolute: {summary(t, errors)}")
    a40 = tables[0]
    print("  jitter of the A40's client, not published (TTFT / TPOT / decode rate):")
    for jitter in (0.0, 0.02, 0.05, 0.1, 0.2):
        print(f"    U(0, {jitter:g} s): {summary(a40, a40.errors(jitter_s=jitter))}")
    published = [predict.predict_published(t.params, t.shape, t.gpu, t.rows, t.facts) for t in tables]
    inside = total = 0
    for t, p in zip(tables, published, strict=True):
        for point, row in zip(p["points"], t.rows, strict=True):
            if row.concurrency == 1:
                continue
            for metric in ("ttft_s", "tpot_s", "output_tok_per_s"):
                if real := row.measured(metric):
                    m = point["metrics"][metric]
                    total, inside = total + 1, inside + (m["low"] <= real <= m["high"])
    print(f"  80 % intervals hold {inside} of {total} measured cells at C > 1 (both engines)")
    naive = [
        abs(point["metrics"]["ttft_s"]["value"] / row.ttft_mean_s - 1)
        for point, row in zip(published[0]["points"], tables[0].rows, strict=True)
        if row.engine == "hf" and row.concurrency > 1
    ]
    print(f"  naive server, FIFO from its own C = 1 points: TTFT at most {100 * max(naive):.2f} % off")


Cells = dict[tuple[str, str, str], list[tuple[float, bool]]]  # (engine, group, metric): (error, whether inside) a point
Scores = dict[tuple[str, str, str], tuple[float, int, int]]  # mean absolute error, points inside the interval, points
METRICS = ("ttft_s", "tpot_s", "output_tok_per_s")
HELD_OUT = ("vllm", "C>1")  # what the pooled lines are of


class Reference:
    """A kept run: what was frozen before its points were measured, what this predictor says of them, and the peers."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        self.params = params.read_file(self.dir / "params.yaml")
        self.shape = model.read_shape(self.params.model, self.dir)
        self.gpu = hardware.Gpu(**self._json("hardware.json")["gpu"])
        self.points = results.read_points(self.dir)
        self._measured = {p.key: p for p in self.points}
        self._standing = standing.standing(self._json("predictions.json")["frozen"])
        self.frozen = self._cells(self._standing)
        # others say nothing of other engines than vLLM, and give no intervals
        self.peers = {
            p["stage"]: self._cells([{"stage": "peer:vllm", "points": p["points"]}])
            for p in peers.read(self.dir / "peers.csv")
        }

    def _json(self, name: str) -> dict:
        return json.loads((self.dir / name).read_text(encoding="utf-8"))

    @cached_property
    def now(self) -> Cells:
        """Today's predictor in place of the one that froze, from the calibration points only."""
        entries = []
        for e in self._standing:
            name = e["stage"].partition(":")[2]
            if name:
                learned = [p for p in self.points if p.engine == name and p.sweep == "calibration"]
                facts = {name: self._json(f"engines/{name}.json")}
                told = predict.predict_run(
                    self.params, self.shape, self.gpu, facts=facts, calibration=learned, engines=[name],
                    capacity_per_s=e["capacity_per_s"],
                )  # fmt: skip
                entries.append({"stage": e["stage"], "points": told["points"]})
        return self._cells(entries)

    def _cells(self, entries: list[dict]) -> Cells:
        """What entries got wrong. Groups: "C=1" (prompt lengths and loads of one client), "C>1", "open" loops, and
        "again": prompts sent before. Calibration points and the datasheet's entry are left out."""
        cells: Cells = {}
        for entry in entries:
            engine = entry["stage"].partition(":")[2]
            for p in entry["points"]:
                m = self._measured.get(standing.key(p))
                if not engine or m is None or p["sweep"] == "calibration":
                    continue
                group = "open" if m.rate_per_s else "C>1" if (m.concurrency or 0) > 1 else "C=1"
                if m.repeats_prompts:
                    group = "again"
                for metric in METRICS:
                    said, real = p["metrics"].get(metric), m.measured(metric)
                    if said is None:
                        continue
                    cell = abs(said["value"] / real - 1), holds(said, real)
                    cells.setdefault((engine, group, metric), []).append(cell)
        return cells


@contextlib.contextmanager
def kept_runs() -> Iterator[dict[str, list[Reference]]]:
    """The H200 runs: the earlier ones, unpacked as long as this lasts, and the latest, which taught nothing before
    they were frozen."""
    kept = ROOT / "outputs" / "reference"
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(kept / "earlier.tar.xz") as archive:
            archive.extractall(unpacked, filter="data")
        yield {
            kind: [Reference(path.parent) for path in sorted(folder.glob("*/predictions.json"))]
            for kind, folder in (("earlier", Path(unpacked)), ("latest", kept))
        }


def scores(runs: Iterable[Cells]) -> Scores:
    """Of one run, or of several together."""
    pooled: Cells = {}
    for cells in runs:
        for key, values in cells.items():
            pooled.setdefault(key, []).extend(values)
    return {k: (sum(e for e, _ in v) / len(v), sum(i for _, i in v), len(v)) for k, v in pooled.items()}


def reference_rows(name: str, runs: list[Reference], only: tuple[str, str] | None = None) -> Iterator[str]:
    """A row an engine and group, and below those of vLLM at C > 1 what peers got wrong on the same points."""
    frozen, now = scores(r.frozen for r in runs), scores(r.now for r in runs)
    for engine, group in [only] if only else dict.fromkeys(key[:2] for key in frozen):
        keys = [(engine, group, metric) for metric in METRICS]
        cells = [f"{100 * s[k][0]:6.1f} {s[k][1]:3d}" for k in keys for s in (frozen, now)]
        yield f"  {name:<38}{engine:<6}{group:<6}{frozen[keys[0]][2]:3d}{''.join(cells)}"
        for peer in runs[0].peers if (engine, group) == HELD_OUT else ():
            said = scores(r.peers[peer] for r in runs)
            yield f"    {peer:<51}" + "".join(f"{100 * said[k][0]:6.1f}".ljust(20) for k in keys).rstrip()


def reference() -> None:
    print(
        "\nThe kept runs: mean absolute error in % and points inside the 80 % interval, frozen before measuring, and of"
    )
    print("  today's predictor, which has learned from all of them; tests/test_reference.py has the rows of runs")
    print(f"  {'run':<50}{'of':>5}  TTFT frozen  now    TPOT frozen  now  output frozen  now")
    with kept_runs() as kinds:
        for kind, runs in kinds.items():
            for run in runs:
                print(*reference_rows(f"{kind}/{run.dir.name}", [run]), sep="\n")
        for name, runs in (*kinds.items(), ("all", list(chain(*kinds.values())))):
            print(*reference_rows(f"{name}, {len(runs)} runs", runs, HELD_OUT), sep="\n")


def sensitivity(tables: list[Table]) -> None:
    print("\nEach prior moved by ±25 % (mean absolute error; A40: TTFT / TPOT / decode rate)")
    for name in tables[0].priors():
        for factor in (0.75, 1.25):
            cells = []
            for t in tables:
                priors = t.priors()
                p = priors[name]
                moved = min(max(p.value * factor, p.low), p.high)
                cells.append(f"{t.name} {summary(t, t.errors(priors | {name: replace(p, value=moved)})):<20}")
            print(f"  {name:<22}{'−' if factor < 1 else '+'}25 %   {'   '.join(cells)}")


def cross_validation(tables: list[Table]) -> None:
    print("\nCross-validated: mixed_rows and overlap_loss chosen on one table's cells, scored on the other's")
    grid = [(rows, loss) for rows in (48, 64, 72, 80, 90, 100, 112) for loss in (0.1, 0.2, 0.3, 0.4, 0.5)]
    results = {}
    for t in tables:
        for rows, loss in grid:
            p = t.priors()
            moved = {"mixed_rows": replace(p["mixed_rows"], value=rows)}
            moved |= {"overlap_loss": replace(p["overlap_loss"], value=loss)}
            results[t.name, rows, loss] = t.errors(p | moved)
    for chosen, scored in ((tables[0], tables[1]), (tables[1], tables[0])):
        rows, loss = min(grid, key=lambda g: mean_abs(results[chosen.name, *g]))
        on, off = results[chosen.name, rows, loss], results[scored.name, rows, loss]
        print(f"  chosen on {chosen.name}: rows {rows}, overlap loss {loss} ({summary(chosen, on).strip()} there)"
              f" -> {scored.name}: {summary(scored, off).strip()}")  # fmt: skip


def speed(tables: list[Table]) -> None:
    print("\nSpeed on one core (CPU seconds)")
    a40 = tables[0]
    start = time.process_time()
    run = predict.predict_run(a40.params, a40.shape, a40.gpu)
    seconds, count = time.process_time() - start, len(run["points"])
    print(f"  every point of the A40 run, both engines, intervals included: {seconds:.2f} s ({count} points)")
    times = VllmTimes(a40.shape, a40.gpu, {n: p.value for n, p in a40.priors().items()})
    for prompt, output, c, n in ((512, 128, 32, 5000), (1000, 1000, 128, 2000), (8192, 128, 32, 1000)):
        load = Traffic([Prompt(prompt, output)], concurrency=c, jitter_s=0.05, warmup=c, requests=n)
        start = time.process_time()
        simulation.simulate(SchedulerConfig(kv_blocks=26_900), times, load)
        print(f"  {prompt}/{output} at C = {c}: {(n + c) / (time.process_time() - start):,.0f} simulated requests/s")
    print(f"  peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    tables = [Table("A40"), Table("A100")]
    speed(tables)
    accuracy(tables)
    reference()
    if not quick:
        sensitivity(tables)
        cross_validation(tables)


if __name__ == "__main__":
    sys.exit(main())
