"""`servebook choose`: the cheapest set-up that meets a run's slo at its target load, on the terminal. Needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..predictor import choice_answer
from ..predictor.choice import Choice, name, percent, replicas_of
from ..predictor.choice_search import Candidate
from ..run import choice_files, router_files
from ..run.book import Book, outputs_folder
from ..run.choosing import choice_for, kept_points

SHOWN_REASONS = 5


def main(
    params_path: str, gpus: Sequence[str], max_gpus: int | None, *, as_json: bool, html: Path | None,
    write_params: Path | None, measured: Sequence[Path],
) -> int:  # fmt: skip
    """Search, print, and write what is asked for. With measured runs: also whether they confirm the choice."""
    book = Book.open(params_path)
    _check_ends(html, write_params, measured)
    choice = choice_for(book, params_path, gpus, max_gpus)
    found = choice_answer.answer(choice)
    found["serve"] = choice_files.serve_command(choice, choice.chosen.set_up)
    if measured:
        from ..run.choice_measured import check

        found["measured"] = check(choice, measured)
    if html is not None:
        from ..report.choice import write_choice

        kept = kept_points(book, [outputs_folder(), outputs_folder() / "reference"])
        title = book.params.title or book.params.run
        found["html"] = str(write_choice(html, choice, found, title=title, measured=kept))
    if write_params is not None:
        found["written"] = [str(p) for p in choice_files.write_params(choice, book.base, write_params)]
    print(json.dumps(files.finite(found), indent=1, ensure_ascii=False) if as_json else text(choice, found))
    return 0


def _check_ends(html: Path | None, write_params: Path | None, measured: Sequence[Path]) -> None:
    """Before the search: whether what is asked for can be written and read. Raises ServebookError."""
    if html is not None and html.exists() and not html.is_file():
        what = "is a folder" if html.is_dir() else "is a device or a pipe"
        raise ServebookError(what, f"--html {html}", "Give the name of a file")
    for folder in filter(None, [html and html.parent, write_params]):
        files.check_folder(folder)
    for folder in measured:
        Book.at(folder)


def text(choice: Choice, found: dict[str, Any]) -> str:
    """The answer for people."""
    best, chosen = choice.chosen, found["chosen"]
    assert best.judged is not None
    level = ", ".join(f"{name(m)} p{p:g} ≤ {limit:g} s" for m, (limit, p) in choice.limits.items())
    money = f"{chosen['cost_per_hour']:.2f} {choice.currency}/h"
    lines = [
        f"target  {found['target']}",
        f"level   {level}",
        f"choice  {_counted(best)}",
        f"        meets the level with a probability of {percent(best.judged.probability)}; {money}, "
        f"{chosen['cost_per_million_output_tokens']:.3f} {choice.currency} per million output tokens "
        f"({best.set_up.gpu.name}: {best.set_up.card.price_per_hour:.2f}/h, {best.set_up.card.source})",
    ]
    for m, (limit, p) in choice.limits.items():
        v = best.judged.values[m]
        spread = f"80 % interval {v['low']:.3g} to {v['high']:.3g} s"
        lines.append(f"        {name(m)} p{p:g} {v['value']:.3g} s of {limit:g} s ({spread})")
    lines.append(f"        headroom {choice_answer.more(chosen['room'])} more load; bound by {_binds(found)}")
    lines.append(
        f"        {'calibrated on C = 1 points' if chosen['learned'] else 'predicted from the datasheet alone'}"
    )
    lines += [f"        {note}" for note in found["notes"]]
    lines += ["serve   " + found["serve"], *_replicas(choice), *_rivals(choice, found)]
    lines.append(
        f"searched {choice.searched:,} set-ups: {len(choice.candidates):,} fit, {choice.simulated:,} simulations, "
        f"{choice.judged} judged with draws of the constants; seed {choice.target.seed}"
    )
    rows = choice_answer.reasons(choice.dropped)
    for reason, cards, count in rows[:SHOWN_REASONS]:
        on = f" ({', '.join(cards) if len(cards) < 4 else f'{len(cards)} cards'})" if cards else ""
        lines.append(f"  {count:>4} dropped: {reason}{on}")
    if len(rows) > SHOWN_REASONS:
        lines.append(f"       and {len(rows) - SHOWN_REASONS} further reasons (--json has all)")
    if found.get("measured"):
        lines += ["measured", *(f"  {line}" for line in found["measured"]["lines"])]
    lines += [f"wrote   {path}" for path in [*found.get("written", []), *filter(None, [found.get("html")])]]
    return "\n".join(lines)


def _counted(c: Candidate) -> str:
    return replicas_of(c.replicas or 1, c.set_up)


def _binds(found: dict[str, Any]) -> str:
    binds = found["chosen"]["binds"]
    shares = ", ".join(f"{k} {v:.0%}" for k, v in sorted(binds["shares"].items(), key=lambda p: -p[1]))
    return f"{binds['by']} ({name(binds['latency'])}: {shares}; KV pool {binds['kv_share']:.0%} in use)"


def _replicas(choice: Choice) -> list[str]:
    if (choice.chosen.replicas or 1) < 2:
        return []
    routers = ", ".join(router_files.ROUTERS)
    return [
        f"router  {choice.chosen.replicas} replicas behind one of {routers}: --write-params writes the configuration"
    ]


def _rivals(choice: Choice, found: dict[str, Any]) -> list[str]:
    lines = ["rivals" if choice.rivals else "rivals  none: no other kind of set-up meets the level near its cost"]
    for c, row in zip(choice.rivals, found["rivals"], strict=True):
        sure = c.judged.probability if c.judged else 0.0
        lines.append(f"  {row['cost_per_hour']:>7.2f} {choice.currency}/h  {percent(sure):>8}  {_counted(c)}")
        lines.append(f"                         wins with {row['wins_if']}")
    return lines
