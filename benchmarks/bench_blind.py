"""The runs that were predicted before they were measured: what was committed, against what was measured.

    python benchmarks/bench_blind.py [--today]

Reads outputs/reference/blind-*.json (values from the datasheet alone, with 80 % intervals, committed before the run)
and the measured runs in the archive of the same name. --today adds today's predictor, which has learned from them.
Deterministic; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from servebook.common.measured_point import MeasuredPoint
from servebook.predictor import predict
from servebook.run.book import Book

KEPT = Path(__file__).parents[1] / "outputs" / "reference"
METRICS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "output_tok_per_s": "output"}
Values = Mapping[str, Any]  # metric: (value, low, high)
Rows = dict[tuple[str, str], list[tuple[float, bool]]]  # (load, metric): (error, whether inside) of each point


def load_of(point: MeasuredPoint) -> str:
    """The kind of load, for one line of the table."""
    if point.concurrency == 1:
        return "C = 1"
    return {"concurrency": "C > 1", "arrival_rate": "open", "burst": "burst"}.get(point.kind, point.kind)


def rows(book: Book, predicted: Mapping[str, Values]) -> Rows:
    """What was wrong at each measured point. predicted: by sweep/point, or by sweep/engine/point."""
    found: Rows = {}
    for m in book.stored_points():
        values = predicted.get(f"{m.sweep}/{m.engine}/{m.point_id}") or predicted.get(f"{m.sweep}/{m.point_id}")
        for metric in METRICS if values else ():
            assert values is not None
            value, low, high = values[metric]
            real = m.measured(metric)  # type: ignore[arg-type]
            if real:
                cell = value / real - 1, low <= real <= high
                found.setdefault((load_of(m), metric), []).append(cell)
    return found


def today(book: Book) -> dict[str, Values]:
    """Today's prediction from the datasheet."""
    points = predict.predict_run(book.params, book.shape, book.gpu)["points"]
    return {
        f"{p['sweep']}/{p['engine']}/{p['point']}": {
            m: tuple(p["metrics"][m][k] for k in ("value", "low", "high")) for m in METRICS  # type: ignore[literal-required, index]
        }
        for p in points
        if p.get("metrics")
    }  # fmt: skip


def table(name: str, found: Rows) -> Iterator[str]:
    """A line for each kind of load: mean absolute error and bias in %, and how many values lay inside."""
    for load in dict.fromkeys(load for load, _ in found):
        cells = []
        for metric, title in METRICS.items():
            errors = found.get((load, metric), [])
            mean = sum(abs(e) for e, _ in errors) / len(errors) if errors else math.nan
            bias = sum(e for e, _ in errors) / len(errors) if errors else math.nan
            cells.append(f"{title} {100 * mean:5.1f} ({100 * bias:+6.1f}) {sum(i for _, i in errors):2d}/{len(errors)}")
        yield f"  {name:<32}{load:<7}" + "   ".join(cells)


def users_at_the_limit(points: Iterable[tuple[int, float]]) -> float:
    """The number of users at which the worst latency reaches its limit. points: (users, worst latency ÷ its limit);
    between two points, and beyond the last, the logarithm is taken as linear."""
    near = sorted(points)
    over = next((i for i, (_, worst) in enumerate(near) if worst > 1), len(near) - 1)
    (a, at_a), (b, at_b) = near[max(over - 1, 0)], near[max(over, 1)]
    return a + (b - a) * math.log(1 / at_a) / math.log(at_b / at_a)


def choice(found: Mapping[str, Book], judged: list[dict[str, Any]]) -> None:
    """The set-ups of a choice: predicted and measured users at the level, and the stated probabilities."""
    by: dict[str, tuple[list[tuple[int, float]], list[tuple[int, float]]]] = {}
    stated = []
    for row in judged:
        book = found[row["run"]]
        m = next(
            p for p in book.stored_points()
            if (p.engine, p.concurrency) == (row["engine"], row["users"]) and p.sweep.startswith("users")
        )  # fmt: skip
        limits = {k: limit for k, (limit, _) in book.params.slo.limits.items()}
        real = {"ttft_s": m.ttft_p90_s or math.inf, "tpot_s": m.tpot_p90_s or math.inf}
        worst = max(real[k] / limits[k] for k in limits)
        predicted, measured = by.setdefault(row["set_up"], ([], []))
        predicted.append((row["users"], max(row["values"][k]["value"] / limits[k] for k in limits)))
        measured.append((row["users"], worst))
        stated.append((row["probability"], worst <= 1))
    print("  users at which a set-up stops meeting the level, predicted and measured; fewer: higher cost")
    users = pd.DataFrame(
        {name: map(users_at_the_limit, pair) for name, pair in by.items()}, index=["predicted", "measured"]
    ).T
    for name, (predicted, measured) in users.iterrows():
        print(f"    {name:<52}{predicted:6.1f}{measured:6.1f}  {100 * (predicted / measured - 1):+5.1f} %")
    print(f"    rank correlation {users.rank().corr().iloc[0, 1]:.2f}")
    total, met = sum(p for p, _ in stated), sum(met for _, met in stated)
    print(
        f"  probabilities of meeting the level add up to {total:.1f} of {len(stated)} loads, {met} met it; stated, met:"
    )
    for low, high in ((0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.01)):
        part = [(p, met) for p, met in stated if low <= p < high]
        if part:
            print(f"    {sum(p for p, _ in part) / len(part):6.0%}  {sum(met for _, met in part)} of {len(part)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--today", action="store_true", help="also today's predictor, which has learned from the runs")
    options = parser.parse_args()
    for path in sorted(KEPT.glob("blind-*.json")):
        blind = json.loads(path.read_text(encoding="utf-8"))
        print(
            f"{blind['date']}, from the datasheet alone: mean absolute error in % (bias), values inside 80 % intervals"
        )
        with tempfile.TemporaryDirectory() as unpacked, tarfile.open(path.with_suffix(".tar.xz")) as archive:
            archive.extractall(unpacked, filter="data")
            kept = (Path(unpacked) / name for name in blind["runs"])
            found = {run.name: Book.at(run) for run in kept if run.exists()}
            for name, predicted in blind["runs"].items():
                if name not in found:
                    print(f"  {name.removeprefix('h200-'):<32}predicted, not measured")
                    continue
                print(*table(name.removeprefix("h200-"), rows(found[name], predicted)), sep="\n")
                if options.today:
                    print(*table("  today", rows(found[name], today(found[name]))), sep="\n")
            if "choice" in blind:
                choice(found, blind["choice"])


if __name__ == "__main__":
    main()
