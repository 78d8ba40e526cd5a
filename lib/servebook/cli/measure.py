"""`servebook measure`: load any OpenAI-compatible server and print what was measured. Needs no parameter file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..common import files
from ..common.measured_point import MeasuredPoint
from ..config.params import Load, Slo
from ..config.points import PointSpec
from ..engines import secrets
from ..load.client import Client
from ..load.point import measure_ramp_sync
from ..load.selfcheck import self_check
from ..load.stream import one_line
from ..run_folder import results
from ..run_folder.lock_and_signals import single_run
from . import measure_options
from .json_file import JsonFile

COLUMNS: tuple[tuple[Callable[[MeasuredPoint], Any], str, str], ...] = (
    (lambda p: p.point_id, "load", ""),
    (lambda p: p.requests, "requests", "d"),
    (lambda p: p.failures, "failed", "d"),
    (lambda p: p.ttft_p50_s, "TTFT p50 ms", "ms"),
    (lambda p: p.ttft_p99_s, "p99", "ms"),
    (lambda p: p.tpot_mean_s, "TPOT ms", "ms"),
    (lambda p: p.itl_p99_s, "ITL p99", "ms"),
    (lambda p: p.e2e_p50_s, "E2E p50 ms", "ms"),
    (lambda p: p.output_tok_per_s, "output tok/s", ".1f"),
    (lambda p: p.in_flight_mean, "in flight", ".2f"),
    (lambda p: p.verdict, "verdict", ""),
)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 when every point was measured and none is invalid. Raises ServebookError."""
    o = measure_options.read(argv)
    api_key = secrets.key_of(o.api_key_env, "--api-key-env")
    run = _Run(o, model="", api_key=api_key)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on there may be results to keep
    try:
        with contextlib.ExitStack() as ending:
            if o.out:
                files.check_folder(o.out)
                ending.enter_context(single_run(o.out))
            if o.json:  # after the folder: it may have the same name
                run.json = JsonFile(o.json)
                ending.callback(run.json.close)
            listed = [] if o.model else asyncio.run(_models(o.url, api_key))
            run.model = o.model or listed[0]
            run.guessed_of = len(listed)
            run.measure()
    except KeyboardInterrupt:
        kept = f"points kept: {len(run.points)}" if o.json or o.out else "nothing is kept without --json or --out"
        print(f"\nservebook: interrupted; {kept}", file=sys.stderr)
        return 128 + signal.SIGINT
    if run.pipe_closed and not (o.json or o.out):
        return 1
    return int(any(p.verdict == "invalid" for p in run.points))


class _Run:
    """The points of one command: measured one after the other, each stored and printed at once."""

    def __init__(self, o: argparse.Namespace, *, model: str, api_key: str | None) -> None:
        self.o, self.model, self.api_key = o, model, api_key
        self.points: list[MeasuredPoint] = []
        self.json: JsonFile | None = None
        self.guessed_of = 0  # models that the server listed, if none was given
        self.set_aside: list[str] = []  # a remark on earlier points in the same folder
        self.pipe_closed = False  # the reader of the output has gone
        self.load = Load(
            jitter_s=o.jitter, max_seconds=o.max_seconds, request_timeout_s=o.timeout,
            seed=random.SystemRandom().getrandbits(31) if o.seed is None else o.seed,
            temperature=o.temperature, top_p=o.top_p, top_k=o.top_k,
        )  # fmt: skip

    def measure(self) -> None:
        """Measure the points or ramps one after the other."""
        o = self.o
        for stages in [o.specs] if o.ramp else [[spec] for spec in o.specs]:
            measured = measure_ramp_sync(
                stages, url=o.url, model=self.model, vocab=o.vocabs[0], lower_vocabs=o.vocabs[1:], load=self.load,
                rules=[measure_options.rule_of(o, spec) for spec in stages], batching=not o.no_batching,
                slo=Slo(ttft_s=o.slo_ttft, tpot_s=o.slo_tpot, e2e_s=o.slo_e2e), run_dir=o.out, api_key=self.api_key,
                prompt_set=o.prompt_set, shared_prefix_tokens=o.prefix_tokens, replay_s=o.arrivals_s,
                prompt_lengths=o.prompt_tokens, output_lengths=o.output_tokens,
                endpoint="/v1/chat/completions" if o.chat else "/v1/completions", text=o.text, turns=o.turns,
                count_tokens=o.count_tokens, on_progress=_progress(stages),
            )  # fmt: skip
            before = len(self.points)
            for spec, point in zip(stages, measured, strict=True):
                if o.self_check and point.ttft_p50_s and point.tpot_p50_s:
                    due = dataclasses.replace(spec, rate_per_s=point.arrival_rate_per_s) if o.replay else spec
                    added = self_check(due, ttft_s=point.ttft_p50_s, tpot_s=point.tpot_p50_s)
                    point = dataclasses.replace(
                        point, client_added_ttft_s=added.ttft_s, client_added_tpot_s=added.tpot_s
                    )
                self.points.append(point)
            try:
                self._keep(self.points[before:])
            finally:  # where it cannot be stored, what is shown is all there is
                self._show(before)
            if self.pipe_closed and not (o.json or o.out):
                return

    def _keep(self, points: Sequence[MeasuredPoint]) -> None:
        """Called after every point, because the next may not finish. It stores before it prints, because the reader may
        have gone; a file that cannot be written does not keep the others from it."""
        with contextlib.ExitStack() as stores:
            if self.o.out:
                stores.callback(self._keep_in, self.o.out, points)
            if self.json:
                stored = [p.to_json() for p in self.points]
                stores.callback(self.json.write, stored if len(self.o.specs) > 1 else stored[0])

    def _keep_in(self, folder: Path, points: Sequence[MeasuredPoint]) -> None:
        for point in points:
            if earlier := results.set_aside(folder, point):
                self.set_aside.append(f"{point.point_id} was measured here before: kept as {earlier}")
            results.write_point(folder, point)
        results.write_points_csv(folder)

    def _show(self, start: int) -> None:
        out = sys.stderr if self.json and self.json.on_stdout else sys.stdout
        try:
            for position in range(start, len(self.points)):
                if position == 0:
                    print(_measured(self.points[0], self.guessed_of), file=out)
                _print(self.points[position], header=position == 0, out=out)
            for line in self.set_aside:
                print(f"{'':9}  {line}", file=out)
            self.set_aside.clear()
        except BrokenPipeError:  # results are still stored
            self.pipe_closed = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _measured(point: MeasuredPoint, guessed_of: int) -> str:
    """What was measured, on one line."""
    p, model = point, one_line(point.model or "", 120)
    if guessed_of > 1:
        model = f"{model}, the first of {guessed_of} models (--model names one),"
    lines = [f"measured {model} at {p.endpoint} with {p.prompts}, seed {p.seed}"]
    lines.append(f"asked with {p.request_fields or 'no further field'}; probes: {p.probes}")
    return "\n".join([*lines, *(p.notes or ())])


async def _models(url: str, api_key: str | None) -> list[str]:
    async with Client(url, api_key=api_key) as client:
        return await client.models()


def _progress(stages: Sequence[PointSpec]) -> Any:
    if not sys.stderr.isatty():
        return None
    name = stages[0].point if len(stages) == 1 else f"{stages[0].point} to {stages[-1].point}"
    return lambda text: print(f"\r{name}: {text}\x1b[K", end="", file=sys.stderr, flush=True)


def _print(point: MeasuredPoint, *, header: bool, out: TextIO) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    widths = [max(9, len(title)) for _, title, _ in COLUMNS]
    if header:
        print("  ".join(title.rjust(w) for (_, title, _), w in zip(COLUMNS, widths, strict=True)), file=out)
    cells = (_cell(value(point), form).rjust(w) for (value, _, form), w in zip(COLUMNS, widths, strict=True))
    print("  ".join(cells), file=out)
    for line in (*(r.text for r in point.reasons), *_details(point)):
        print(f"{'':9}  {line}", file=out)
    out.flush()


def _details(p: MeasuredPoint) -> Iterator[str]:
    """Further details, one line each."""
    if p.seconds:
        yield f"measured for {p.seconds:.1f} s: {p.stop_reason}"
    if p.decode_tok_per_s:
        wall = _cell(p.decode_wall_tok_per_s, ".1f")
        yield f"decode {_cell(p.decode_tok_per_s, '.1f')} tok/s while it decodes (running / TPOT), {wall} by the clock"
    if p.requests and p.itl_is_event_gap:
        tokens = _cell(p.tokens_per_event, ".2f")
        yield f"ITL is the gap between reads: an event brings {tokens} tokens, or a read several"
    if p.schedule_lag_p99_s is not None:
        lags = f"{_cell(p.schedule_lag_p50_s, 'ms')} ms (p50), {_cell(p.schedule_lag_p99_s, 'ms')} ms (p99)"
        yield f"arrivals {_cell(p.arrival_rate_per_s, '.2f')}/s; sent {lags} after they were due"
    if any((p.slo_ttft_s, p.slo_tpot_s, p.slo_e2e_s)) and p.goodput_share is not None:
        rate, share = _cell(p.goodput_per_s, ".2f"), _cell(p.goodput_share, ".1%")
        yield f"goodput {rate}/s: {share} of attempted requests kept the slo"
    if p.cache_hit_share:
        yield f"the prefix cache served {_cell(p.cache_hit_share, '.1%')} of the prompts' tokens"
    mean = p.prompt_tokens_mean
    if mean and p.prompts == "words" and abs(mean - p.prompt_tokens) > 0.5:
        yield f"prompts of {p.prompt_tokens} words were {mean:.0f} tokens on average, by the server's count"
    for turn in p.turns or ():
        prompt, ttft = _cell(turn["prompt_tokens_mean"], ".0f"), _cell(turn["ttft_mean_s"], "ms")
        yield f"turn {turn['turn'] + 1}: {turn['requests']} requests, {prompt} prompt tokens, TTFT {ttft} ms"
    if p.client_cpu_s and p.seconds:
        share = f"{p.client_cpu_s / p.seconds:.1%}"
        yield f"client: {share} of a core, its event loop late by {_cell(p.client_loop_lag_p99_s, 'ms')} ms (p99)"
    if p.client_added_ttft_s is not None:
        load = f"C = {p.concurrency}" if p.concurrency else "this rate"
        tpot = _cell((p.client_added_tpot_s or 0.0) * 1e3, ".3f")
        yield f"at {load} the client adds {_cell(p.client_added_ttft_s, 'ms')} ms to TTFT p50 and {tpot} ms to TPOT"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.2f}" if form == "ms" else format(value, form)
