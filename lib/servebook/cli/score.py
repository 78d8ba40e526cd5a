"""`servebook score`: compares another load generator's results with the prediction. Needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

from ..common.errors import ServebookError
from ..config.params import RunParams
from ..config.workloads import Workload
from ..run.book import Book, find_params
from ..scoring import tool_results
from ..scoring.tool_scores import NAMES, ToolScore, score_result


def main(
    params: str, measured: Path, *, engine: str | None, workload: str | None, html: Path | None, as_json: bool
) -> int:
    """Predict every load in a file of results and print predicted against measured, per percentile."""
    book = Book.open(params)
    name = engine or book.main_engine
    if name not in book.params.engines:
        raise ServebookError(f"there is no engine {name!r}", "--engine", f"There are {', '.join(book.params.engines)}")
    results = tool_results.read(find_params(measured))
    given = None if workload is None else named_workload(book.params, workload)
    scores = [score_result(book.params, book.shape, book.gpu, name, r, given) for r in results]
    if html is not None:
        from ..report.tool_scores import write_tool_scores

        print(write_tool_scores(html, scores, book.params, book.gpu, source=Path(measured)))
    elif as_json:
        print(json.dumps([_json(s) for s in scores], indent=1))
    else:
        print("\n\n".join(text(s) for s in scores))
    return 0


def named_workload(params: RunParams, name: str) -> Workload:
    """One of the run's workloads. Raises ServebookError for an unknown name."""
    known = params.workloads
    if name not in known:
        raise ServebookError(
            f"there is no workload {name!r}", "--workload", f"There are {', '.join(known) or 'none in the parameters'}"
        )
    return known[name]


def text(score: ToolScore) -> str:
    """One load: its conditions, one line per figure, and the cause of the largest gap."""
    lines = [f"{score.result.tool}: {'; '.join(score.conditions)}"]
    lines += [f"  assumed: {line}" for line in score.assumed]
    if score.rows:
        lines.append(f"  {'':<18}{'predicted':>12}{'80 % interval':>22}{'measured':>12}{'error':>9}")
    for row in score.rows:
        scale, unit = (1e3, " ms") if row.metric in NAMES else (1.0, "")
        span = f"[{row.low * scale:.4g}, {row.high * scale:.4g}]"
        values = f"{row.predicted * scale:>12.4g}{span:>22}{row.measured * scale:>12.4g}{row.error:>+9.1%}"
        lines.append(f"  {row.name + unit:<18}{values}")
    return "\n".join([*lines, f"  {score.gap}"])


def _json(score: ToolScore) -> dict[str, object]:
    return {
        "tool": score.result.tool, "conditions": score.conditions, "assumed": score.assumed, "gap": score.gap,
        "rows": [
            {
                "metric": r.metric, "statistic": r.statistic, "predicted": r.predicted, "low": r.low, "high": r.high,
                "measured": r.measured, "error": r.error,
            }
            for r in score.rows
        ],
    }  # fmt: skip
