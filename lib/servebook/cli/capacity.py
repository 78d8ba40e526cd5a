"""`servebook capacity`: what every engine of a run carries within its slo, on the terminal. Needs no GPU."""

from __future__ import annotations

import json
import math
from typing import Any

from ..common.errors import ServebookError
from ..config import lengths, params, points
from ..config.workloads import Workload
from ..hardware import catalog as hardware
from ..predictor import capacity, closed_forms
from ..run.book import Book
from .score import named_workload


def main(
    params_path: str,
    workload: str | None,
    prompt_tokens: str | None,
    output_tokens: str | None,
    others: list[str],
    *,
    as_json: bool,
) -> int:
    """Print what every engine of a run carries under its slo; a stored run's C = 1 points and facts are used if there.

    workload: one of the run's; prompt_tokens, output_tokens: lengths in the words of a workload; by default the
    requests of the first sweep. others: "NAME" or "NAME=PRICE per hour" of GPUs in the catalog. Raises ServebookError
    for a run without slo.
    """
    book = Book.open(params_path)
    slo = book.params.slo
    if slo.ttft_s is None and slo.tpot_s is None and slo.e2e_s is None:
        raise ServebookError("no service level is given", f"{params_path}, slo", "Set slo: {ttft_s: 0.5, tpot_s: 0.05}")
    asked = requests_of(book.params, workload, prompt_tokens, output_tokens)
    prompt, output = asked.mean_tokens()
    alike = not (asked.varies or asked.repeats)
    gpus = []
    for other in others:
        name, equals, price = other.partition("=")
        try:
            cost = float(price) if equals else 0.0
        except ValueError:
            cost = math.nan
        if not name or not 0 <= cost < math.inf:
            fault = f"{price!r} is not a price" if name else "names no GPU"
            raise ServebookError(fault, f"--gpu {other}", "Write NAME=PRICE, as in H200=3.50")
        gpus.append((hardware.resolve(params.HardwareParams(gpu=name)), cost))
    learned = [p for p in book.stored_points() if p.sweep == points.CALIBRATION]
    rows = capacity.capacity(
        book.params, book.shape, book.gpu, prompt, output, facts=book.all_facts(), calibration=learned,
        other_gpus=gpus, workload=None if alike else asked,
    )  # fmt: skip
    print(
        json.dumps(rows, indent=1) if as_json else text(rows, prompt, output, book.params, bool(learned), alike=alike)
    )
    return 0


def requests_of(
    run: params.RunParams, name: str | None, prompt_tokens: str | None, output_tokens: str | None
) -> Workload:
    """The requests. Raises ServebookError for an unknown workload or invalid lengths."""
    if name is not None:
        if prompt_tokens or output_tokens:
            raise ServebookError(
                "would be ignored", "--prompt-tokens, --output-tokens", "The workload defines the lengths"
            )
        return named_workload(run, name)
    sweep = next(iter(run.sweeps.values()), None)
    own = getattr(sweep, "workload", None)
    if own is not None and prompt_tokens is None and output_tokens is None:
        return run.workloads[own]
    prompt, output = closed_forms.workloads(run)[0] if sweep is not None else (512, 128)
    laws = []
    for option, words, otherwise in (
        ("--prompt-tokens", prompt_tokens, prompt), ("--output-tokens", output_tokens, output)
    ):  # fmt: skip
        try:
            laws.append(lengths.parse(str(words or otherwise)))
        except ValueError as error:
            raise ServebookError(str(error), option, f"Valid: {lengths.SYNTAX}") from None
    return Workload.of(laws[0], laws[1])


def text(
    rows: list[dict[str, Any]], prompt: int, output: int, run: params.RunParams, learned: bool, *, alike: bool = True
) -> str:
    """One line per case: the largest C and rate at which 90 % of requests meet the slo, output rate, cost."""
    targets = [f"{k.removesuffix('_s').upper()} ≤ {v:g} s" for k, (v, _) in run.slo.limits.items()]
    source = "calibrated on the stored C = 1 points" if learned else "from the datasheet alone"
    tokens = f"{prompt} in, {output} out{'' if alike else ' on average'}"
    lines = [f"{tokens}, 90 % of requests within {' and '.join(targets)}; {source}"]
    money = f"{run.hardware.currency}/1M tokens"
    lines.append(f"{'':<40}{'closed loop':>15}{'open loop':>18}")
    lines.append(f"{'engine':<8}{'case':<32}{'C':>6}{'tok/s':>9}{'rate/s':>9}{'tok/s':>9}{money:>15}")
    for r in rows:
        c, rate = r["by_concurrency"], r["by_rate"]
        if c is None and rate is None:
            lines.append(f"{r['engine']:<8}{r['case']:<32}  {r['note']}")
            continue
        closed = f"{c['concurrency']:>6}{c['output_tok_per_s']:>9,.0f}" if c else f"{'–':>6}{'–':>9}"
        opened = f"{rate['rate_per_s']:>9.2f}{rate['output_tok_per_s']:>9,.0f}" if rate else f"{'–':>9}{'–':>9}"
        cost = rate and rate["cost_per_million_output_tokens"]
        lines.append(f"{r['engine']:<8}{r['case']:<32}{closed}{opened}" + (f"{cost:>15.3f}" if cost else f"{'–':>15}"))
    if any(_open_carries_more(r) for r in rows):
        lines += [
            "open loop above closed loop: clients of a closed loop send again as soon as a request ends, so their",
            "prompts arrive together and wait; arrivals of an open loop are spread, and more of them meet the TTFT.",
        ]
    return "\n".join(lines)


def _open_carries_more(row: dict[str, Any]) -> bool:
    c, rate = row["by_concurrency"], row["by_rate"]
    return bool(c and rate and rate["output_tok_per_s"] > 1.1 * c["output_tok_per_s"])
