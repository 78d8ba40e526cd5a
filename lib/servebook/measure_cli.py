"""`servebook measure`: load any OpenAI-compatible server and print what was measured. Needs no parameter file."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import files, results
from .errors import ServebookError
from .load import lengths
from .load.client import Client
from .load.point import measure_ramp_sync
from .load.selfcheck import self_check
from .load.window import Rule
from .params import Load, Slo
from .points import PointSpec

COLUMNS = (
    ("point", "load", ""), ("requests", "requests", "d"), ("failures", "failed", "d"),
    ("ttft_p50_s", "TTFT p50 ms", "ms"), ("ttft_p99_s", "p99", "ms"), ("tpot_mean_s", "TPOT ms", "ms"),
    ("itl_p99_s", "ITL p99", "ms"), ("e2e_p50_s", "E2E p50 ms", "ms"), ("output_tok_per_s", "output tok/s", ".1f"),
    ("in_flight_mean", "in flight", ".2f"), ("verdict", "verdict", ""),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when every point was measured and none is invalid. Raises ServebookError."""
    o = _parser().parse_args(argv)
    if o.lengths:
        o.prompt_tokens, o.output_tokens = lengths.read_csv(o.lengths)
    api_key = _api_key(o.api_key_env)
    model = o.model or asyncio.run(_first_model(o.url, api_key))
    load = Load(
        jitter_s=o.jitter, warmup_requests=o.warmup, max_seconds=o.max_seconds, request_timeout_s=o.timeout,
        seed=secrets.randbits(31) if o.seed is None else o.seed,
        temperature=o.temperature, top_p=o.top_p, top_k=o.top_k,
    )  # fmt: skip
    replay = _replay(o.replay) if o.replay else ()
    specs = _specs(o)
    _check(o, specs)
    points: list[dict[str, Any]] = []
    for stages in [specs] if o.ramp else [[spec] for spec in specs]:
        measured = measure_ramp_sync(
            stages, url=o.url, model=model, vocab=range(*o.vocab), load=load, api_key=api_key,
            rules=[_rule(o, spec) for spec in stages], batching=not o.no_batching,
            slo=Slo(ttft_s=o.slo_ttft, tpot_s=o.slo_tpot, e2e_s=o.slo_e2e), run_dir=o.out,
            prompt_set=o.prompt_set, shared_prefix_tokens=o.shared_prefix_tokens, replay_s=replay,
            prompt_lengths=o.prompt_tokens, output_lengths=o.output_tokens,
            endpoint="/v1/chat/completions" if o.chat else "/v1/completions", text=o.text, turns=o.turns,
            on_progress=_progress(stages),
        )  # fmt: skip
        for spec, point in zip(stages, measured, strict=True):
            if o.self_check and point["ttft_p50_s"] and point["tpot_p50_s"]:
                point |= self_check(spec, ttft_s=point["ttft_p50_s"], tpot_s=point["tpot_p50_s"])
            points.append(point)
            _print(point, header=len(points) == 1)
    if o.json:
        files.write_json(o.json, points[0] if len(points) == 1 else points)
    if o.out:
        results.write_points_csv(o.out)
    return int(any(p["verdict"] == "invalid" for p in points))


def _rule(o: argparse.Namespace, spec: PointSpec) -> Rule:
    """Whole rounds of the clients, so that completions over seconds is their rate."""
    c = spec.concurrency or 1
    n = -(-o.requests // c) * c
    most = sys.maxsize if o.min_seconds else n
    return Rule(max(c, o.warmup) if o.warmup else 0, n, most, o.min_seconds, o.max_seconds)


def _check(o: argparse.Namespace, specs: Sequence[PointSpec]) -> None:
    clients = [spec.concurrency or 0 for spec in specs]
    if o.ramp and (o.replay or len(specs) < 2 or clients != sorted(clients)):
        raise ServebookError("no stages that grow", "--ramp", "Give --concurrency 1,2,4 (ascending) or --rate 1,2,4")
    if o.turns > 1 and (o.rate or o.replay):
        raise ServebookError("a conversation waits for its answers", "--turns", "Use --concurrency, a closed loop")


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="servebook measure", description="Load any OpenAI-compatible server, measure it.")
    p.add_argument("--url", required=True, help="e.g. http://127.0.0.1:8000 (with or without /v1)")
    p.add_argument("--model", help="the server's first unless given")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--concurrency", type=_counts, default=[1], help="closed loop at so many; several: 1,2,4")
    how.add_argument("--rate", type=_rates, help="open loop at so many requests a second; several: 0.5,1,2")
    how.add_argument("--replay", type=Path, metavar="FILE", help="open loop at the times in FILE, seconds, one a line")
    p.add_argument("--arrivals", choices=("poisson", "constant", "gamma"), default="poisson")
    p.add_argument("--gamma-shape", type=float, default=1.0)
    p.add_argument("--ramp", action="store_true", help="several loads are stages of one, with no pause between them")
    p.add_argument("--prompt-tokens", type=_length, default=512, help=lengths.SYNTAX)
    p.add_argument("--output-tokens", type=_length, default=128, help="likewise")
    p.add_argument("--lengths", type=Path, metavar="FILE", help="CSV with the columns prompt_tokens and output_tokens")
    p.add_argument(
        "--turns", type=_count, default=1, help="requests of a conversation: each has all before it in its prompt"
    )
    p.add_argument("--text", action="store_true", help="words instead of token ids; --prompt-tokens counts words")
    p.add_argument("--chat", action="store_true", help="the chat endpoint, with text")
    p.add_argument("--requests", type=_count, default=100, help="measured requests, after the warm-up")
    p.add_argument("--min-seconds", type=float, default=0.0, help="go on for at least so long")
    p.add_argument("--max-seconds", type=float, default=600.0, help="deadline of a point: it ends here whatever it has")
    p.add_argument("--warmup", type=int, default=10, help="first max(C, N) completions are not measured; 0: none")
    p.add_argument("--jitter", type=float, default=0.05, metavar="S", help="pause of a client before its next request")
    p.add_argument("--timeout", type=float, default=600.0, metavar="S", help="a request fails after so long")
    p.add_argument("--seed", type=int, help="of prompts and arrivals; a fresh one unless given, so no prompt repeats")
    p.add_argument("--vocab", type=_range, default=(256, 8000), metavar="LOW:HIGH", help="token ids prompts draw from")
    p.add_argument("--no-batching", action="store_true", help="the server decodes one request at a time")
    p.add_argument("--prompt-set", metavar="NAME", help="repeat this set's prompts at every point")
    p.add_argument("--shared-prefix-tokens", type=int, default=0, metavar="N", help="leading tokens all prompts share")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--top-p", type=float, help="this or --top-k: what makes vLLM use its fused sampler")
    p.add_argument("--top-k", type=int)
    p.add_argument("--slo-ttft", type=float, metavar="S")
    p.add_argument("--slo-tpot", type=float, metavar="S")
    p.add_argument("--slo-e2e", type=float, metavar="S")
    p.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    p.add_argument("--json", type=Path, metavar="FILE", help="the point (several: a list) as JSON")
    p.add_argument("--out", type=Path, metavar="DIR", help="request rows, series and points go here")
    p.add_argument("--self-check", action="store_true", help="also measure what this client adds at the same load")
    p.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    return p


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


def _number(text: str, kind: type[int] | type[float]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive {'whole number' if kind is int else 'number'}")
    return value


def _count(text: str) -> int:
    return _number(text, int)


def _length(text: str) -> lengths.Length:
    try:
        return lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> list[int]:
    return [_number(part, int) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [_number(part, float) for part in text.split(",")]


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 256:8000")
    return int(low), int(high)


def _replay(path: Path) -> list[float]:
    try:
        return [float(line) for line in path.read_text().split()]
    except OSError as error:
        raise ServebookError(f"cannot read: {error.strerror}", str(path)) from None
    except ValueError as error:
        raise ServebookError(f"not a list of seconds ({error})", str(path), "One arrival time a line") from None


def _api_key(variable: str | None) -> str | None:
    if variable and variable not in os.environ:
        raise ServebookError(f"the environment variable {variable} is not set", "--api-key-env")
    return os.environ[variable] if variable else None


async def _first_model(url: str, api_key: str | None) -> str:
    async with Client(url, api_key=api_key) as client:
        return (await client.models())[0]


def _progress(stages: Sequence[PointSpec]) -> Any:
    if not sys.stderr.isatty():
        return None
    name = stages[0].point if len(stages) == 1 else f"{stages[0].point} to {stages[-1].point}"
    return lambda text: print(f"\r{name}: {text}\x1b[K", end="", file=sys.stderr, flush=True)


def _print(point: Mapping[str, Any], *, header: bool) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    widths = [max(9, len(title)) for _, title, _ in COLUMNS]
    if header:
        print("  ".join(title.rjust(w) for (_, title, _), w in zip(COLUMNS, widths, strict=True)))
    cells = (_cell(point.get(key), form).rjust(w) for (key, _, form), w in zip(COLUMNS, widths, strict=True))
    print("  ".join(cells))
    for reason in point["reasons"]:
        print(f"{'':9}  {reason}")
    for turn in point.get("turns") or ():
        prompt, ttft = (_cell(turn[k], form) for k, form in (("prompt_tokens_mean", ".0f"), ("ttft_mean_s", "ms")))
        print(f"{'':9}  turn {turn['turn'] + 1}: {turn['requests']} requests, {prompt} prompt tokens, TTFT {ttft} ms")
    if (added := point.get("client_added_ttft_s")) is not None:
        tpot = 1e3 * point["client_added_tpot_s"]
        print(f"{'':9}  at this load the client adds {1e3 * added:.2f} ms to TTFT p50 and {tpot:.3f} ms to TPOT")
    sys.stdout.flush()


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.2f}" if form == "ms" else format(value, form)
