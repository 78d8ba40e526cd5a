"""The options of `servebook measure`: parses and checks them, and derives the points to measure."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from ..common.errors import ServebookError
from ..config import lengths
from ..config.points import PointSpec
from ..load.window import Rule
from . import option_values as values
from .parser import Parser

VOCABS = (range(256, 8000), range(100, 2000), range(64, 256))  # tried in this order without --vocab


def read(argv: list[str] | None) -> argparse.Namespace:
    """The checked options, with derived ones: specs (the stages of a ramp, or separate points), arrivals_s (of a
    replay) and prefix_tokens.

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
    """When a point ends: after whole rounds of all clients, so that completions / seconds is their rate. A replay ends
    with its last arrival."""
    c, arrivals = spec.concurrency or 1, len(o.arrivals_s)
    n = -(-(o.requests or arrivals or 100) // c) * c
    warmup = (min(10, arrivals // 10) if arrivals else 10) if o.warmup is None else o.warmup
    most = sys.maxsize if o.min_seconds else n
    return Rule(max(c, warmup) if warmup else 0, n, most, o.min_seconds, o.max_seconds)


def _parser() -> argparse.ArgumentParser:
    p = Parser(prog="servebook measure", description="Benchmark any OpenAI-compatible server.")
    add = p.add_argument
    add("--url", type=values.text, required=True, help="the server, e.g. http://127.0.0.1:8000 (with or without /v1)")
    add("--model", type=values.text, help="model name in the requests; default: the first that the server lists")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the API key")
    _add_load(p.add_argument_group("load"))
    _add_prompts(p.add_argument_group("requests"))
    _add_rules(p.add_argument_group("length of a point"))
    _add_limits(p.add_argument_group("service level"))
    _add_output(p.add_argument_group("output"))
    add("--debug", action="store_true", help=argparse.SUPPRESS)
    return p


def _add_load(p: argparse._ArgumentGroup) -> None:
    loop = p.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency", type=values.counts, default=[1], metavar="C",
        help="number of concurrent requests (closed loop); several points: 1,2,4; default: 1",
    )  # fmt: skip
    loop.add_argument("--rate", type=values.rates, metavar="R", help="requests/s (open loop); several points: 0.5,1,2")
    loop.add_argument(
        "--replay", type=Path, metavar="FILE", help="open loop with recorded arrival times: seconds, one per line"
    )
    arrivals = ("poisson", "constant", "gamma")
    p.add_argument("--arrivals", choices=arrivals, help="distribution of --rate's arrivals; default: poisson")
    p.add_argument("--gamma-shape", type=values.shape, metavar="K", help="shape of --arrivals gamma; below 1: burstier")
    p.add_argument("--ramp", action="store_true", help="run several loads one after the other without a pause")
    _seconds(
        p, "--jitter", "maximum random pause of a client between requests, limited to 4 %% of the mean latency", 0.05,
        values.not_negative,
    )  # fmt: skip
    p.add_argument("--seed", type=values.seed, metavar="N", help="seed of prompts and arrivals; default: random")


def _add_prompts(p: argparse._ArgumentGroup) -> None:
    add, tried = p.add_argument, ", ".join(f"{v.start}:{v.stop}" for v in VOCABS)
    add("--prompt-tokens", type=values.length, metavar="N", help=f"prompt length: {lengths.SYNTAX}; default: 512")
    add(
        "--output-tokens",
        type=values.length,
        metavar="N",
        help="output length, written like --prompt-tokens; default: 128",
    )
    add("--lengths", type=Path, metavar="FILE", help="CSV with lengths; columns: prompt_tokens, output_tokens")
    add("--turns", type=values.positive_count, default=1, metavar="N",
        help="requests per conversation; each prompt repeats the conversation so far; default: 1")  # fmt: skip
    add("--text", action="store_true", help="send words instead of token ids; --prompt-tokens then counts words")
    add("--chat", action="store_true", help="use the chat endpoint, with text prompts")
    add("--vocab", dest="vocabs", type=values.id_range, metavar="LOW:HIGH",
        help=f"token ids for prompts (HIGH excluded); "
        f"default: the first of {tried} that the server accepts")  # fmt: skip
    add(
        "--prompt-set",
        type=values.text,
        metavar="NAME",
        help="send the prompts of the set NAME at every point; default: each point has its own prompts",
    )
    add("--shared-prefix", type=values.prefix, default=0, metavar="N|P%",
        help="number or percentage of leading tokens shared by all prompts")  # fmt: skip
    add("--count-tokens", choices=("usage", "events", "asked"), default="usage",
        help="for a server that reports no usage: events (count token events) or asked (assume the "
        "requested length); the point is then suspect")  # fmt: skip
    add(
        "--temperature",
        type=values.not_negative,
        default=0.0,
        metavar="T",
        help="sampling temperature; default: 0 (greedy)",
    )
    add("--top-p", type=values.share, metavar="P", help="no effect at temperature 0; default: the server's")
    add("--top-k", type=values.positive_count, metavar="K", help="default: the server's")


def _add_rules(p: argparse._ArgumentGroup) -> None:
    p.add_argument(
        "--requests", type=values.positive_count, metavar="N",
        help="requests to measure, in whole rounds of C; default: 100, or with --replay all after the warm-up",
    )  # fmt: skip
    p.add_argument(
        "--warmup", type=values.count, metavar="N",
        help="warm-up requests, at least C; default: 10 (--replay: a tenth, at most 10); 0: none",
    )  # fmt: skip
    _seconds(
        p, "--min-seconds", "measure at least S seconds and N requests, then until the confidence intervals are narrow",
        0, values.not_negative,
    )  # fmt: skip
    _seconds(p, "--max-seconds", "maximum duration", 600)
    _seconds(p, "--timeout", "time after which a request counts as failed", 600)


def _add_limits(p: argparse._ArgumentGroup) -> None:
    _seconds(p, "--slo-ttft", "limit on TTFT; goodput counts requests within all limits")
    _seconds(p, "--slo-tpot", "limit on TPOT")
    _seconds(p, "--slo-e2e", "limit on the end-to-end latency")


def _add_output(p: argparse._ArgumentGroup) -> None:
    add = p.add_argument
    add("--json", type=Path, metavar="FILE", help="write the point as JSON (several points: a list); -: to stdout")
    add("--out", type=Path, metavar="DIR", help="folder for request rows, server series and points")
    add("--self-check", action="store_true", help="also measure the latency that this client adds at the same load")
    add("--no-batching", action="store_true", help="tell the audit that the server decodes one request at a time")


def _seconds(
    p: argparse._ArgumentGroup, option: str, help: str, default: float | None = None,
    kind: Callable[[str], float] = values.positive,
) -> None:  # fmt: skip
    """An option in seconds."""
    more = f"; default: {default:g}" if default else ""
    p.add_argument(
        option, type=kind, default=None if default is None else float(default), metavar="S", help=help + more
    )


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
