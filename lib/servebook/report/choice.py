"""A choice as a page of its own and as a notebook's tables: answer, chart, rivals, what was dropped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from .. import charts
from ..charts import words
from ..predictor import choice_answer
from ..predictor.choice import Choice, name, percent, replicas_of
from .markup import Html, esc, table
from .page import Body, download, write_page

NOT_SEARCHED = (
    "Not searched: replicas that span machines, separate servers for prompts and answers, speculative decoding, KV "
    "caches off the card, checkpoints of 4 or 8 bits (name one as the model), and what the engine's own settings fix."
)
SHOWN = 25  # set-ups of the long table, cheapest first


def write_choice(
    out: Path | str, choice: Choice, found: Mapping[str, Any], *, title: str, measured: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write the page of an answer (choice_answer.answer) and return its path."""
    import json

    body = Body()
    body.add(lead(choice, found))
    body.section("The set-ups at the target load")
    body.add(charts.html_figure(figure(found, measured)))
    body.section("What to run")
    body.add(command(found["serve"]) if "serve" in found else "")
    body.section("Rivals")
    body.add(rivals_table(choice, found))
    body.section("Every set-up that was simulated")
    body.add(set_ups_table(choice, found))
    body.section("What was not")
    body.add(dropped_table(choice, found))
    if found.get("measured"):
        body.section("Measured")
        body.add("<ul>" + "".join(f"<li>{esc(line.strip())}</li>" for line in found["measured"]["lines"]) + "</ul>")
    body.section("What this rests on")
    body.add(basis(choice))
    heading = f"Which set-up: {title}"
    raw = json.dumps(found, indent=1, ensure_ascii=False).encode()
    context = {
        "title": heading, "description": f"The cheapest set-up for {found['target']}.", "kicker": "Predicted",
        "run": choice.workshop.params.run, "stamp": [],
        "downloads": [download("choice.json", raw, "application/json", "the whole answer", "choice.json")],
    }  # fmt: skip
    return write_page(Path(out), [body.chapter(heading)], [], context)


def command(line: str) -> Html:
    """A command for a shell, a flag a line."""
    words_of = shlex.split(line)
    rows = [words_of[:3]]
    for word in words_of[3:]:
        if word.startswith("-") or not rows[1:]:
            rows.append([])
        rows[-1].append(word)
    text = " \\\n  ".join(shlex.join(row) for row in rows)
    return Html(f"<pre><code>{esc(text)}</code></pre>")


def lead(choice: Choice, found: Mapping[str, Any]) -> Html:
    """The answer in sentences."""
    best, chosen = choice.chosen, found["chosen"]
    level = words.listing([f"{name(m)} p{p:g} ≤ {words.seconds(x)}" for m, (x, p) in choice.limits.items()])
    replicas = replicas_of(best.replicas or 1, best.set_up)
    sure = best.judged.probability if best.judged else 0.0
    binds, room = chosen["binds"], choice_answer.more(chosen["room"])
    text = (
        f"For {found['target']} within {level}, the cheapest set-up is {replicas}: {chosen['cost_per_hour']:.2f} "
        f"{choice.currency} an hour, {chosen['cost_per_million_output_tokens']:.3f} {choice.currency} per million "
        f"output tokens. It meets the level with a probability of {percent(sure)}, carries {room} "
        f"more load before it misses it, and is bound by {binds['by']} ({name(binds['latency'])})."
    )
    return Html(f"<p>{esc(text)}</p>")


def figure(found: Mapping[str, Any], measured: Sequence[Mapping[str, Any]] = ()) -> Figure:
    """The chart of an answer."""
    return charts.choice_front(found["set_ups"], found["chosen"], measured, currency=found["currency"])


def rivals_table(choice: Choice, found: Mapping[str, Any]) -> Html:
    """The choice and the best of every other kind, with what would make each win."""
    rows = [found["chosen"] | {"wins_if": "the choice"}, *found["rivals"]]
    frame = pd.DataFrame(
        {
            "set-up": [_counted(r) for r in rows],
            f"{choice.currency}/h": [r["cost_per_hour"] for r in rows],
            "per million output tokens": [r["cost_per_million_output_tokens"] for r in rows],
            "meets the level": [r["probability"] for r in rows],
            **{f"{name(m)} p{p:g}": [_value(r, m) for r in rows] for m, (_, p) in choice.limits.items()},
            "wins with": [r["wins_if"] for r in rows],
        }
    )
    shown: dict[str, Any] = {
        "meets the level": lambda v: None if pd.isna(v) else percent(v),
        f"{choice.currency}/h": "{:.2f}".format, "per million output tokens": "{:.3f}".format,
    }  # fmt: skip
    return table(frame, "The choice and its rivals", formats=shown)


def _counted(row: Mapping[str, Any]) -> str:
    """So many replicas of a set-up; of one that misses the level, those it was tried with."""
    count = row["replicas"] or max(1, row["cards"] // row["gpus"])
    return f"{count} replica{'s' * (count > 1)} of {row['name']}"


def _value(row: Mapping[str, Any], latency: str) -> str:
    found = row["values"].get(latency)
    if not found:
        return "–"
    span = f" ({words.seconds(found['low'])} to {words.seconds(found['high'])})" if "low" in found else ""
    return words.seconds(found["value"]) + span


def set_ups_table(choice: Choice, found: Mapping[str, Any]) -> Html:
    """The cheapest of the simulated set-ups."""
    rows = sorted(found["set_ups"], key=lambda r: (not r["meets"], r["cost_per_hour"]))[:SHOWN]
    frame = pd.DataFrame(
        {
            "set-up": [_counted(r) for r in rows],
            "cards": [r["cards"] for r in rows],
            f"{choice.currency}/h": [r["cost_per_hour"] for r in rows],
            "tok/s a user": [r["user_tok_per_s"] for r in rows],
            "tok/s a card": [r["tok_per_s_per_gpu"] for r in rows],
            **{f"{name(m)} p{p:g}": [_value(r, m) for r in rows] for m, (_, p) in choice.limits.items()},
            "misses": [r["misses"] or "" for r in rows],
        }
    )
    caption = f"The {len(rows)} cheapest of {len(found['set_ups'])} simulated set-ups, one simulation each"
    return table(frame, caption, formats={f"{choice.currency}/h": "{:.2f}".format})


def dropped_table(choice: Choice, found: Mapping[str, Any]) -> Html:
    """Why set-ups do not fit."""
    rows = choice_answer.reasons(choice.dropped)
    frame = pd.DataFrame({
        "reason": [r for r, _, _ in rows], "cards": [", ".join(cards) for _, cards, _ in rows],
        "set-ups": [n for _, _, n in rows],
    })  # fmt: skip
    rest = f"; the closed form puts {found['not_simulated']:,} others far behind or shows that they miss the level"
    if not rows:
        text = f"All {found['searched']:,} set-ups fit{rest}."
        return Html(f"<p>{esc(text)}</p>")
    return table(
        frame, f"Dropped before any simulation: {sum(choice.dropped.values()):,} of {found['searched']:,}{rest}"
    )


def basis(choice: Choice) -> Html:
    """Prices, seed, and what the probabilities are made of."""
    cards = {c.set_up.gpu.name: c.set_up.card for c in choice.candidates}
    prices = "; ".join(f"{n} {c.price_per_hour:.2f} ({c.source})" for n, c in cards.items())
    learned = "constants learned from the run's C = 1 points where the card and precision are the same, elsewhere "
    text = [
        f"Prices of one card for an hour, {choice.currency}: {prices}. List prices move: give your own with --gpu.",
        f"Predicted with {learned if choice.workshop.calibrated else ''}constants from the datasheet; the probability "
        "is over draws of those constants, draws of the arrivals, and what the step-time model gets wrong on public "
        f"measurements. Seed {choice.target.seed}: the same answer each time.",
        *choice.chosen.server.notes,
        "8-bit weights and KV caches change a model's answers, which servebook does not measure: at one cost the "
        "model's own precisions are chosen.",
        "A load over several replicas is shared out evenly; the router itself is not simulated.",
        NOT_SEARCHED,
    ]
    return Html("<ul>" + "".join(f"<li>{esc(t)}</li>" for t in text) + "</ul>")
