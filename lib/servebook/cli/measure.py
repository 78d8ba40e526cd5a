"""`servebook measure`: load any OpenAI-compatible server and print what was measured. Needs no parameter file."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common import files
from ..common.errors import ServebookError
from ..config.params import Load, Slo
from ..config.points import PointSpec
from ..load.client import Client
from ..load.point import measure_ramp_sync
from ..load.selfcheck import self_check
from ..run_folder import results
from . import measure_options

COLUMNS = (
    ("point", "load", ""), ("requests", "requests", "d"), ("failures", "failed", "d"),
    ("ttft_p50_s", "TTFT p50 ms", "ms"), ("ttft_p99_s", "p99", "ms"), ("tpot_mean_s", "TPOT ms", "ms"),
    ("itl_p99_s", "ITL p99", "ms"), ("e2e_p50_s", "E2E p50 ms", "ms"), ("output_tok_per_s", "output tok/s", ".1f"),
    ("in_flight_mean", "in flight", ".2f"), ("verdict", "verdict", ""),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when every point was measured and none is invalid. Raises ServebookError."""
    o = measure_options.read(argv)
    api_key = _api_key(o.api_key_env)
    model = o.model or asyncio.run(_first_model(o.url, api_key))
    load = Load(
        jitter_s=o.jitter, max_seconds=o.max_seconds, request_timeout_s=o.timeout,
        seed=secrets.randbits(31) if o.seed is None else o.seed,
        temperature=o.temperature, top_p=o.top_p, top_k=o.top_k,
    )  # fmt: skip
    points: list[dict[str, Any]] = []
    try:
        _measure(o, points, model=model, load=load, api_key=api_key)
    except KeyboardInterrupt:
        kept = f"points kept: {len(points)}" if o.json or o.out else "nothing is kept without --json or --out"
        print(f"\nservebook: interrupted; {kept}", file=sys.stderr)
        return 128 + signal.SIGINT
    return int(any(p["verdict"] == "invalid" for p in points))


def _measure(
    o: argparse.Namespace, points: list[dict[str, Any]], *, model: str, load: Load, api_key: str | None
) -> None:
    """Measure one point, or one ramp, after the other; each is printed, stored and put into `points` at once."""
    for stages in [o.specs] if o.ramp else [[spec] for spec in o.specs]:
        measured = measure_ramp_sync(
            stages, url=o.url, model=model, vocab=o.vocabs[0], lower_vocabs=o.vocabs[1:], load=load, api_key=api_key,
            rules=[measure_options.rule_of(o, spec) for spec in stages], batching=not o.no_batching,
            slo=Slo(ttft_s=o.slo_ttft, tpot_s=o.slo_tpot, e2e_s=o.slo_e2e), run_dir=o.out,
            prompt_set=o.prompt_set, shared_prefix_tokens=o.prefix_tokens, replay_s=o.arrivals_s,
            prompt_lengths=o.prompt_tokens, output_lengths=o.output_tokens,
            endpoint="/v1/chat/completions" if o.chat else "/v1/completions", text=o.text, turns=o.turns,
            on_progress=_progress(stages),
        )  # fmt: skip
        for spec, point in zip(stages, measured, strict=True):
            if o.self_check and point["ttft_p50_s"] and point["tpot_p50_s"]:
                load_of = dataclasses.replace(spec, rate_per_s=point.get("arrival_rate_per_s")) if o.replay else spec
                point |= self_check(load_of, ttft_s=point["ttft_p50_s"], tpot_s=point["tpot_p50_s"])
                if o.out:
                    results.write_point(o.out, point)
            points.append(point)
            _print(point, header=len(points) == 1)
        if o.json:  # after every point: the next may not come to its end
            files.write_json(o.json, points if len(o.specs) > 1 else points[0])
        if o.out:
            results.write_points_csv(o.out)


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
    for line in (*point["reasons"], *_details(point)):
        print(f"{'':9}  {line}")
    sys.stdout.flush()


def _details(p: Mapping[str, Any]) -> Iterator[str]:
    """What the table has no room for, a line each."""

    def t(key: str, form: str) -> str:
        return _cell(p.get(key), form)

    if p["seconds"]:
        yield f"measured for {p['seconds']:.1f} s: {p['stop_reason']}"
    if p.get("decode_tok_per_s"):
        wall = t("decode_wall_tok_per_s", ".1f")
        yield f"decode {t('decode_tok_per_s', '.1f')} tok/s while it decodes (running / TPOT), {wall} by the clock"
    if p["requests"] and p["itl_is_event_gap"]:
        yield f"ITL is the gap between reads: an event brings {t('tokens_per_event', '.2f')} tokens, or a read several"
    if p.get("schedule_lag_p99_s") is not None:
        lags = f"{t('schedule_lag_p50_s', 'ms')} ms (p50), {t('schedule_lag_p99_s', 'ms')} ms (p99)"
        yield f"arrivals {t('arrival_rate_per_s', '.2f')}/s; sent {lags} after they were due"
    if any(p.get(f"slo_{name}_s") for name in ("ttft", "tpot", "e2e")) and p.get("goodput_share") is not None:
        yield f"goodput {t('goodput_per_s', '.2f')}/s: {t('goodput_share', '.1%')} of attempted requests kept the slo"
    if p.get("cache_hit_share"):
        yield f"the prefix cache served {t('cache_hit_share', '.1%')} of the prompts' tokens"
    for turn in p.get("turns") or ():
        prompt, ttft = (_cell(turn[k], form) for k, form in (("prompt_tokens_mean", ".0f"), ("ttft_mean_s", "ms")))
        yield f"turn {turn['turn'] + 1}: {turn['requests']} requests, {prompt} prompt tokens, TTFT {ttft} ms"
    if p.get("client_cpu_s") and p["seconds"]:
        share = f"{p['client_cpu_s'] / p['seconds']:.1%}"
        yield f"client: {share} of a core, its event loop late by {t('client_loop_lag_p99_s', 'ms')} ms (p99)"
    if p.get("client_added_ttft_s") is not None:
        load = f"C = {p['concurrency']}" if p["concurrency"] else "this rate"
        tpot = _cell(p["client_added_tpot_s"] * 1e3, ".3f")
        yield f"at {load} the client adds {t('client_added_ttft_s', 'ms')} ms to TTFT p50 and {tpot} ms to TPOT"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.2f}" if form == "ms" else format(value, form)
