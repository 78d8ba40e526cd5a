"""The options of `servebook measure`: parsed, validated, and turned into points."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..common.errors import ServebookError
from ..config import lengths
from ..config.points import PointSpec
from ..load.window import Rule
from .parser import Parser

VOCABS = (range(256, 8000), range(100, 2000), range(64, 256))  # tried in this order where --vocab names none
MOST_IDS = 1 << 20  # four times the largest vocabulary in use (Gemma's 262,144): beyond it is a slip of the hand
MOST_PER_S, LEAST_SHAPE = 10_000, 0.01  # as in parameter files (param_types.Rate, sweeps.ArrivalRateSweep)

N = TypeVar("N", int, float)


def read(argv: list[str] | None) -> argparse.Namespace:
    """The checked options, with derived ones: specs (a ramp's stages, or separate points), arrivals_s (of a replay) and
    prefix_tokens.

    Raises ServebookError for options that exclude each other and for unusable files; exits with status 2 and one line
    for an invalid value.
    """
    o = _parser().parse_args(argv)
    reject_ignored_options(o)
    if o.lengths:
        o.prompt_tokens, o.output_tokens = lengths.read_csv(o.lengths)
    o.arrivals_s = _arrivals(o.replay) if o.replay else []
    o.specs = _specs(o)
    mean = lengths.typical(o.prompt_tokens)
    o.prefix_tokens = round(o.shared_prefix * mean) if isinstance(o.shared_prefix, float) else o.shared_prefix
    clients = [spec.concurrency or 0 for spec in o.specs]
    if o.ramp and (o.replay or len(o.specs) < 2 or clients != sorted(clients)):
        raise ServebookError(
            "the load must grow from stage to stage", "--ramp", "Give --concurrency 1,2,4 (ascending) or --rate 1,2,4"
        )
    if o.min_seconds > o.max_seconds:
        what = f"{o.min_seconds:g} is more than --max-seconds {o.max_seconds:g}"
        raise ServebookError(what, "--min-seconds", "Lower it, or raise --max-seconds")
    if o.turns > 1 and (o.rate or o.replay):
        raise ServebookError("conversations need a closed loop", "--turns", "Use --concurrency")
    if len({spec.point for spec in o.specs}) < len(o.specs):
        raise ServebookError("names the same load twice", "--rate" if o.rate else "--concurrency", "Give each once")
    if o.prefix_tokens >= mean:
        raise ServebookError("is not shorter than the prompt", "--shared-prefix", "Give fewer tokens")
    return o


def reject_ignored_options(o: argparse.Namespace) -> None:
    """Reject options that have no effect without another one, then fill in defaults."""
    text = o.text or o.chat
    for option, given, fix, used in (
        ("--arrivals", o.arrivals, "Give --rate, or leave it out", o.rate),
        ("--gamma-shape", o.gamma_shape, "Give --arrivals gamma, or leave it out", o.arrivals == "gamma"),
        ("--prompt-tokens", o.prompt_tokens, "Leave it out: --lengths gives the lengths", not o.lengths),
        ("--output-tokens", o.output_tokens, "Leave it out: --lengths gives the lengths", not o.lengths),
        ("--vocab", o.vocabs, "Leave it out: --text and --chat send words", not text),
    ):
        if given and not used:
            raise ServebookError("would be ignored", option, fix)
    o.arrivals, o.gamma_shape, o.vocabs = o.arrivals or "poisson", o.gamma_shape or 1.0, o.vocabs or VOCABS
    o.prompt_tokens, o.output_tokens = o.prompt_tokens or 512, o.output_tokens or 128


def rule_of(o: argparse.Namespace, spec: PointSpec) -> Rule:
    """When a point ends: after whole rounds of the clients, so that completions / seconds is their rate; a replay ends
    with its last arrival."""
    c, arrivals = spec.concurrency or 1, len(o.arrivals_s)
    n = -(-(o.requests or arrivals or 100) // c) * c
    warmup = (min(10, arrivals // 10) if arrivals else 10) if o.warmup is None else o.warmup
    most = sys.maxsize if o.min_seconds else n
    return Rule(max(c, warmup) if warmup else 0, n, most, o.min_seconds, o.max_seconds)


def _parser() -> argparse.ArgumentParser:
    p = Parser(prog="servebook measure", description="Benchmark any OpenAI-compatible server.")
    p.add_argument(
        "--url", type=_text, required=True, help="the server, e.g. http://127.0.0.1:8000 (with or without /v1)"
    )
    p.add_argument("--model", type=_text, help="model name in the requests; default: the first that the server lists")
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        type=_counts,
        default=[1],
        help="number of concurrent requests (closed loop); several points: 1,2,4",
    )
    how.add_argument("--rate", type=_rates, help="requests per second (open loop); several points: 0.5,1,2")
    how.add_argument(
        "--replay", type=Path, metavar="FILE", help="open loop with recorded arrival times: seconds, one per line"
    )
    p.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "gamma"),
        help="how the arrivals of --rate are spaced; default: poisson",
    )
    p.add_argument("--gamma-shape", type=_shape, help="shape of --arrivals gamma; below 1: burstier than Poisson")
    p.add_argument("--ramp", action="store_true", help="run several loads one after the other without a pause")
    _add_prompts(p)
    _add_rules(p)
    _add_sampling_and_limits(p)
    p.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    p.add_argument(
        "--json", type=Path, metavar="FILE", help="write the point as JSON (several points: a list); -: to stdout"
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="folder for request rows, server series and points")
    p.add_argument(
        "--self-check", action="store_true", help="also measure the latency that this client adds at the same load"
    )
    p.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    return p


def _add_prompts(p: argparse.ArgumentParser) -> None:
    """Options of what a request contains."""
    p.add_argument("--prompt-tokens", type=_length, help=f"prompt length: {lengths.SYNTAX}; default: 512")
    p.add_argument("--output-tokens", type=_length, help="output length, written like --prompt-tokens; default: 128")
    p.add_argument(
        "--lengths", type=Path, metavar="FILE", help="lengths from a CSV with columns prompt_tokens and output_tokens"
    )
    p.add_argument(
        "--turns",
        type=_count,
        default=1,
        help="requests per conversation; each repeats the whole conversation in its prompt",
    )
    p.add_argument(
        "--text", action="store_true", help="send words instead of token ids; --prompt-tokens then counts words"
    )
    p.add_argument("--chat", action="store_true", help="use the chat endpoint (text)")
    p.add_argument(
        "--count-tokens", choices=("usage", "events", "asked"), default="usage",
        help="for a server that reports no usage: events (count token events) or asked (assume the "
        "requested length); the point is then suspect",
    )  # fmt: skip


def _add_rules(p: argparse.ArgumentParser) -> None:
    """Options of a point's length and of its prompts."""
    tried = ", ".join(f"{v.start}:{v.stop}" for v in VOCABS)
    p.add_argument(
        "--requests",
        type=_count,
        help="requests to measure after the warm-up, in whole rounds of C; default: 100, or what --replay has left",
    )
    p.add_argument(
        "--min-seconds",
        type=_not_negative,
        default=0.0,
        help="minimum duration of a point; it then goes on until its means are known, at most --max-seconds",
    )
    p.add_argument("--max-seconds", type=_positive, default=600.0, help="maximum duration of a point; default: 600")
    p.add_argument(
        "--warmup",
        type=_whole,
        help="warm-up requests, at least C; default: 10 (--replay: a tenth, at most 10); 0: none",
    )
    p.add_argument(
        "--jitter",
        type=_not_negative,
        default=0.05,
        metavar="S",
        help="random think time of a client, 0 to S seconds and at most a small share of the latency; default: 0.05",
    )
    p.add_argument(
        "--timeout",
        type=_positive,
        default=600.0,
        metavar="S",
        help="time after which a request counts as failed; default: 600",
    )
    p.add_argument(
        "--seed", type=_seed, help="seed of prompts and arrivals; default: a new one, so that no prompt repeats"
    )
    p.add_argument(
        "--vocab", dest="vocabs", type=_range, metavar="LOW:HIGH",
        help=f"range of token ids for prompts, HIGH excluded; default: the first of {tried} that the server accepts",
    )  # fmt: skip
    p.add_argument(
        "--no-batching",
        action="store_true",
        help="declare that the server decodes one request at a time (for the audit)",
    )
    p.add_argument(
        "--prompt-set", type=_text, metavar="NAME", help="send the same prompts, named by this set, at every point"
    )
    p.add_argument(
        "--shared-prefix",
        type=_prefix,
        default=0,
        metavar="N|P%",
        help="number or percentage of leading tokens shared by all prompts",
    )


def _add_sampling_and_limits(p: argparse.ArgumentParser) -> None:
    p.add_argument("--temperature", type=_not_negative, default=0.0, help="sampling temperature; default: 0 (greedy)")
    p.add_argument("--top-p", type=_share, help="top-p of every request; without effect at temperature 0")
    p.add_argument("--top-k", type=_count, help="top-k of every request")
    p.add_argument(
        "--slo-ttft", type=_positive, metavar="S", help="limit on TTFT; goodput counts requests within all limits"
    )
    p.add_argument("--slo-tpot", type=_positive, metavar="S", help="limit on TPOT")
    p.add_argument("--slo-e2e", type=_positive, metavar="S", help="limit on the end-to-end latency")


def _specs(o: argparse.Namespace) -> list[PointSpec]:
    sweep, engine, tokens = "measure", "server", (lengths.typical(o.prompt_tokens), lengths.typical(o.output_tokens))
    if o.replay:
        return [PointSpec(sweep, engine, "replay", "arrival_rate", *tokens)]
    if o.rate:
        return [
            PointSpec(
                sweep, engine, f"r{r:.3f}", "arrival_rate", *tokens,
                rate_per_s=r, arrivals=o.arrivals, gamma_shape=o.gamma_shape,
            )
            for r in o.rate
        ]  # fmt: skip
    return [PointSpec(sweep, engine, f"c{c:04d}", "concurrency", *tokens, concurrency=c) for c in o.concurrency]


def _number(text: str, kind: type[N], what: str, fits: Callable[[float], bool]) -> N:
    try:
        if not text.isascii() or "_" in text:  # Python reads both, no other program does
            raise ValueError
        value: N = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}") from None
    if not (abs(value) < math.inf and fits(value)):  # math.isfinite raises for an int of 400 digits
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return value


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8") from None
    return text


def _count(text: str) -> int:
    return _number(text, int, "positive whole number", lambda v: v > 0)


def _whole(text: str) -> int:
    return _number(text, int, "whole number from 0 on", lambda v: v >= 0)


def _seed(text: str) -> int:
    return _number(text, int, "whole number from 0 on, below 2^63", lambda v: 0 <= v < 2**63)


def _shape(text: str) -> float:
    return _number(text, float, f"positive number from {LEAST_SHAPE} on", lambda v: v >= LEAST_SHAPE)


def _positive(text: str) -> float:
    return _number(text, float, "positive number", lambda v: v > 0)


def _not_negative(text: str) -> float:
    return _number(text, float, "number from 0 on", lambda v: v >= 0)


def _share(text: str) -> float:
    return _number(text, float, "share above 0 and up to 1", lambda v: 0 < v <= 1)


def _prefix(text: str) -> float:
    """Tokens, or a share of the mean prompt below 1."""
    if text.endswith("%"):
        return _number(text[:-1], float, "percentage below 100", lambda v: 0 <= v < 100) / 100
    return _whole(text)


def _length(text: str) -> lengths.Length:
    try:
        return lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    what = f"positive number up to {MOST_PER_S}"
    return [_number(part, float, what, lambda v: 0 < v <= MOST_PER_S) for part in text.split(",")]


def _range(text: str) -> list[range]:
    low, _, high = text.partition(":")
    what = f"range such as 256:8000, up to {MOST_IDS}"
    digits = text.isascii() and low.isdigit() and high.isdigit() and len(text) < 20
    if not (digits and int(low) < int(high) <= MOST_IDS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
    return [range(int(low), int(high))]


def _arrivals(path: Path) -> list[float]:
    """Arrival times in ascending order, in seconds after the first."""
    try:
        times = sorted(float(line) for line in path.read_text().split())
    except (OSError, UnicodeDecodeError) as error:
        raise ServebookError(f"cannot read: {getattr(error, 'strerror', None) or error}", str(path)) from None
    except ValueError as error:
        raise ServebookError(f"not a list of seconds ({error})", str(path), "Write one arrival time per line") from None
    if not times or not all(map(math.isfinite, times)):
        fault = "contains a time that is not a number" if times else "contains no arrival"
        raise ServebookError(fault, str(path), "Write one arrival time per line, in seconds")
    return [t - times[0] for t in times]
