"""How right the predictor is on measurements that others published.

    python benchmarks/bench_public.py [--data DIR] [--json] [--jobs N] [--source NAME] [--rows]

DIR (default: outputs/published/public) holds points.csv and models/. Every row is predicted with its lengths as
measured: from the datasheet alone ("datasheet"), and learning from the rows of its server with the least load
("calibrated", scored on that server's other rows). error: mean of |predicted ÷ measured − 1|; bias: of the signed;
inside: share of the measured values within the 80 % interval. What cannot be predicted, and figures that their own
row rules out, are counted and named. LEARNED says which sources constants were chosen with in view; the others are
scored apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import public_points
from public_points import METRICS, Row
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.predictor import simulation
from servebook.predictor.calibration import Z80, Calibration, calibrate
from servebook.predictor.intervals import form_error
from servebook.predictor.server_limits import PredictedServer, Times
from servebook.predictor.simulated_clients import Traffic
from servebook.predictor.steptime import VllmTimes

OWN = Path(__file__).parents[1] / "outputs" / "published" / "public"
STAGES = ("datasheet", "calibrated")
SAMPLES = 8
MOST, MOST_DRAWN, MOST_LEARNED = 1500, 400, 200  # requests of a simulated row
# Sources in whose view constants of priors.py and steptime.py were chosen: the host's time a step (aic-silicon), small
# all-reduces over PCIe (dennislee-a100), launches in eager mode (cssnoeasy-a100). All other constants are from kernel
# tables and from runs on H200s. The widths of intervals on others' loads (intervals.FORM_ERROR) and how little a TTFT
# and an output rate of several clients teach a calibration (calibration.CROWD) follow the residuals of all sources.
LEARNED = frozenset({"aic-silicon", "dennislee-a100", "cssnoeasy-a100"})


# what a row of somebody else's table may raise; each is named in one line
EXPECTED = (ServebookError, ValueError, KeyError, TypeError, ArithmeticError, AttributeError, LookupError, OSError)
Named = dict[str, list[str]]


@dataclass
class Score:
    """One value of one row: predicted / measured − 1, and whether the measured lies in the interval."""

    row: Row
    stage: str
    metric: str
    predicted: float
    error: float
    inside: bool
    half: float  # of the interval, in logarithms


def figures(server: PredictedServer, times: Times, load: Traffic, p50: bool) -> dict[str, float]:
    """TTFT, TPOT (s) and output tokens/s that the load shows; means, or medians where the source gives those."""
    result = simulation.simulate(server.config, times, load)
    rate = result.output_tokens / result.seconds if result.seconds > 0 else math.nan
    found = {"output": rate}
    for metric in ("ttft", "tpot"):
        values = result.measured.values(f"{metric}_s")
        middle = statistics.median if p50 else statistics.fmean
        found[metric] = float(middle(values)) if len(values) else math.nan
    return found


class Bench:
    """One server of a table: its rows, from the datasheet and calibrated."""

    def __init__(self, rows: Sequence[Row], folder: Path, known: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self.failed, self.ruled_out, self.unlearned = folder, list[str](), list[str](), list[str]()
        tool = known.get(rows[0].cells.get("source", ""), {}).get("tool", "")
        self.untold = str(tool).lower().startswith("not told")
        self.usable = [(row, server) for row in rows if (server := self._server(row)) is not None]

    def _server(self, row: Row) -> PredictedServer | None:
        """None where the row cannot be predicted, or has no figure that can be true."""
        try:
            public_points.take_figures(row)
            if not row.measured:
                self.failed.append(f"{row.name}: no figure of TTFT, TPOT or output rate")
                return None
            if not 0 < row.offered < math.inf:
                raise ServebookError("the row tells no load", row.name, "Give concurrency, rate_per_s or num_prompts")
            public_points.traffic_of(row, self.untold, 1, 1)  # tells whether the load can be read
            server = public_points.server_of(row, self.folder)
            for metric, why in public_points.impossible(row, server).items():
                self.ruled_out.append(f"{row.name}: {metric} {why}")
                del row.measured[metric]
            return server if row.measured else None
        except EXPECTED as error:
            self.failed.append(f"{row.name}: {_one_line(error).removeprefix(f'{row.name}: ')}")
            return None

    def predict(self, row: Row, server: PredictedServer, times: Times, seed: int, most: int) -> dict[str, float]:
        found = dict.fromkeys(METRICS, 0.0)
        for run, weight in public_points.runs_of(row):
            load = public_points.traffic_of(run, self.untold, seed, most)
            if isinstance(times, VllmTimes) and (load.concurrency or 2) > 1:
                times.overlap = 1  # every stage of a pipeline has a group's batch
            for metric, value in figures(server, times, load, row.cells.get("stat") == "p50").items():
                found[metric] += weight * value
        found["output"] *= public_points.groups_of(row)
        return found

    def score(self, stage: str, row: Row, server: PredictedServer, calibration: Calibration) -> list[Score]:
        central = self.predict(row, server, server.times(calibration.constants), 1, MOST)
        drawn = [
            self.predict(row, server, server.times(c), 2 + i, MOST_DRAWN)
            for i, c in enumerate(calibration.samples(SAMPLES, 1))
        ]
        scores = []
        for metric in METRICS:
            if metric not in row.measured or not central[metric] > 0:
                continue
            logs = [math.log(d[metric]) for d in drawn if d[metric] > 0]
            spread = statistics.stdev(logs) if len(logs) > 1 else 0.0
            half = Z80 * math.hypot(spread, form_error(metric, calibration.stage))
            off = math.log(central[metric] / row.measured[metric])
            scores.append(Score(row, stage, metric, central[metric], math.expm1(off), abs(off) <= half, half))
        return scores

    def learn(self, rows: Sequence[tuple[Row, PredictedServer]]) -> Calibration:
        """Constants from these rows, or none: the datasheet's priors."""
        server = rows[0][1]
        points = []
        for i, (row, _) in enumerate(rows):
            c = int(row.number("concurrency") or 2)
            alone = c == 1 and row.cells.get("load") == "closed"
            points.append(
                MeasuredPoint(
                    sweep="public",
                    engine="vllm",
                    point_id=str(i),
                    concurrency=1 if alone else max(c, 2),
                    prompt_tokens=int(row.number("prompt_tokens") or 0),
                    output_tokens=int(row.number("output_tokens") or 0),
                    ttft_mean_s=row.measured.get("ttft"),
                    tpot_mean_s=row.measured.get("tpot"),
                    output_tok_per_s=row.measured.get("output"),
                )
            )

        def simulated(times: Times, point: MeasuredPoint) -> Mapping[str, float]:
            row, own = rows[int(point.point_id)]
            return self.predict(row, own, times, 1, MOST_LEARNED)

        return calibrate(
            "vllm", server.shape, server.gpu, points, facts=public_points.facts_of(rows[0][0]),
            budget=server.config.max_num_batched_tokens, layout=server.layout,
            times=server.times, simulated=simulated,
        )  # fmt: skip

    def run(self, stages: Sequence[str]) -> list[Score]:
        scores: list[Score] = []
        for stage in stages:
            least = min((row.offered for row, _ in self.usable), default=0.0)
            learned = [(row, s) for row, s in self.usable if row.offered == least] if stage == "calibrated" else []
            rest = [(row, s) for row, s in self.usable if not learned or row.offered != least]
            if not rest:
                continue
            try:
                known = self.learn(learned) if learned else None
            except EXPECTED as error:
                self.unlearned.append(f"{learned[0][0].name}: {_one_line(error)}")
                known = None
            for row, server in rest:
                try:
                    scores += self.score(stage, row, server, known or self.prior(row, server))
                except EXPECTED as error:
                    self.failed.append(f"{row.name}: {stage}: {_one_line(error).removeprefix(f'{row.name}: ')}")
        return scores

    def prior(self, row: Row, server: PredictedServer) -> Calibration:
        return calibrate("vllm", server.shape, server.gpu, facts=public_points.facts_of(row), layout=server.layout)


def _one_line(error: BaseException) -> str:
    """What is wrong, in one line: an unexpected error with its kind."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ServebookError) else f"{type(error).__name__}: {text}"


def _bench(job: tuple[list[Row], Path, dict[str, dict[str, Any]], Sequence[str]]) -> tuple[list[Score], Named]:
    rows, folder, known, stages = job
    bench = Bench(rows, folder, known)
    scores = bench.run(stages)
    named = {"failed": bench.failed, "ruled_out": bench.ruled_out, "unlearned": bench.unlearned}
    return scores, {k: list(dict.fromkeys(v)) for k, v in named.items()}


def summary(scores: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Errors by metric, as shares."""
    out: dict[str, dict[str, float]] = {}
    for metric in METRICS:
        if of := [s for s in scores if s.metric == metric]:
            sizes = [abs(s.error) for s in of]
            out[metric] = {
                "error": round(statistics.fmean(sizes), 4),
                "median": round(statistics.median(sizes), 4),
                "bias": round(statistics.fmean(s.error for s in of), 4),
                "inside": round(sum(s.inside for s in of) / len(of), 4),
                "n": len(of),
            }
    return out


def _load(row: Row) -> str:
    kind, c = row.cells.get("load", ""), row.offered
    if kind != "closed":
        return kind
    for low, high in ((1, 1), (2, 8), (9, 32), (33, 128)):
        if low <= c <= high:
            return f"closed C={low}" if low == high else f"closed C={low}-{high}"
    return "closed C>128"


BY: dict[str, Callable[[Row], str]] = {
    "source": lambda r: r.cells.get("source", ""),
    "gpu": lambda r: r.cells.get("gpu", ""),
    "tp": lambda r: r.cells.get("tp", ""),
    "quant": lambda r: r.cells.get("quant") or "none",
    "load": _load,
    "constants": lambda r: "learned with it in view" if r.cells.get("source") in LEARNED else "not learned from",
}


def tables(scores: Sequence[Score], stages: Sequence[str]) -> dict[str, Any]:
    """The result: by stage, and by each of BY and stage."""
    out: dict[str, Any] = {stage: summary([s for s in scores if s.stage == stage]) for stage in stages}
    out["by"] = {
        name: {
            key: {stage: summary([s for s in scores if s.stage == stage and of(s.row) == key]) for stage in stages}
            for key in sorted({of(s.row) for s in scores})
        }
        for name, of in BY.items()
    }
    return out


def _line(label: str, of: Mapping[str, Mapping[str, float]]) -> str:
    cells = []
    for metric in METRICS:
        f = of.get(metric)
        shares = [f"{100 * f[k]:{w}}" for k, w in WIDTHS] if f else []
        cells.append(f"{' '.join(shares)} {f['n']:4.0f}" if f else " " * 28)
    return f"{label:42s} | " + " | ".join(cells)


WIDTHS = (("error", "6.1f"), ("median", "5.1f"), ("bias", "+6.1f"), ("inside", "4.0f"))


def show(found: Mapping[str, Any], stages: Sequence[str]) -> None:
    """The tables as text, in percent."""
    print(f"{'%: error, median, bias, inside, values':42s} | " + " | ".join(f"{m:28s}" for m in METRICS))
    for stage in stages:
        print(_line(stage, found[stage]))
    for name, groups in found["by"].items():
        for key, of in groups.items():
            for stage in stages:
                if of[stage]:
                    print(_line(f"{name} {key}, {stage}", of[stage]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=OWN)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--source", default="", help="only sources whose name holds this")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--rows", action="store_true", help="every value")
    args = parser.parse_args()
    stages, begun = args.stages.split(","), time.monotonic()
    try:
        known = public_points.sources(args.data, OWN)
        rows = public_points.read(args.data, known)
    except ServebookError as error:
        print(error, file=sys.stderr)
        return 1
    rows = [r for r in rows if r.cells.get("v1", "1") != "0" and args.source in r.cells.get("source", "")]
    jobs = [(group, args.data, known, stages) for group in public_points.setups(rows).values()]
    scores: list[Score] = []
    named: Named = {"failed": [], "ruled_out": [], "unlearned": []}
    with ProcessPoolExecutor(max(args.jobs, 1)) as pool:
        for got, of in pool.map(_bench, jobs):
            scores += got
            for what, texts in of.items():
                named[what] += texts
    found = tables(scores, stages)
    found |= {"rows": len(rows), **named}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    if args.rows:
        for s in scores:
            values = f"{s.row.measured[s.metric]:10.4f} {s.predicted:10.4f} {100 * s.error:+7.1f}"
            print(f"{s.stage[:5]} {s.row.name:80s} {s.metric:6s} {values} {'' if s.inside else 'out'}")
    show(found, stages)
    counts = [f"{len(named['failed'])} not predicted", f"{len(named['ruled_out'])} figures ruled out by their own rows"]
    print(f"{len(rows)} rows, {', '.join(counts)}, {len(named['unlearned'])} servers that nothing was learned of")
    print(f"{time.monotonic() - begun:.0f} s")
    for what, title in (("failed", "not predicted"), ("ruled_out", "ruled out"), ("unlearned", "not learned from")):
        for text in named[what]:
            print(f"  {title}: {text[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
