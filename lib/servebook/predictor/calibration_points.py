"""The points for a calibration: usable figures, their precision, and checks against physical bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..hardware.catalog import Gpu
from ..model.shape import ModelShape
from .parallel import ALONE, Layout

HIT_SHARE = 0.02  # prefix-cache hit share above which TTFT is not the time of a full prefill


def lengths(p: MeasuredPoint) -> str:
    """Prompt and output tokens as text, e.g. 512/128."""
    return f"{p.prompt_tokens}/{p.output_tokens}"


def relative_sd(mean: float, low: float | None, high: float | None, form: float, host: float) -> float:
    """Relative sd of a measured mean, from its 95 % interval (if given), the model's error and the host's noise."""
    floor = math.hypot(form, host)
    if low is None or high is None or not high > low:
        return floor
    return math.hypot(floor, (high - low) / 3.92 / mean)


def server_prefill(p: MeasuredPoint) -> tuple[float, float] | None:
    """(prefill, front end) in seconds, or None. front end = client TTFT − server prefill − server queue, from the means
    of vLLM's histograms. prefill is the server's mean plus the client's median − mean TTFT."""
    prefill, queue = p.server_prefill_mean_s, p.server_queue_mean_s
    if prefill is None or queue is None or p.ttft_mean_s is None or not prefill > 0:
        return None
    front = p.ttft_mean_s - prefill - queue
    usual = prefill + (p.ttft_p50_s or p.ttft_mean_s) - p.ttft_mean_s
    return (usual, front) if front > 0 and usual > 0 else None


def usable_figures(point: MeasuredPoint, shape: ModelShape, gpu: Gpu, layout: Layout = ALONE) -> MeasuredPoint | None:
    """The point with its usable figures; None if it has none. A TTFT that the prefix cache shortened is removed.

    Raises ServebookError for a figure that is physically impossible.
    """
    ttft, tpot, prompt = point.ttft_mean_s, point.tpot_mean_s, point.prompt_tokens
    where = f"calibration point {point.engine} {lengths(point)}"
    for name, seconds in (("ttft_mean_s", ttft), ("tpot_mean_s", tpot)):
        if seconds is not None and not (0 < seconds < math.inf):
            raise ServebookError(f"{name} is {seconds:g} s", where, "Measure the point again")
    if (point.cache_hit_share or 0.0) > HIT_SHARE:
        ttft = None
    rate = point.output_tok_per_s if (point.concurrency or 1) > 1 else None
    nothing = ttft is None and tpot is None and not rate
    if nothing or not prompt or not point.output_tokens or point.verdict == "invalid":
        return None
    clean = replace(point, ttft_mean_s=ttft)
    if gpu.is_cpu:
        return clean  # a CPU's peak rate is an estimate, so it gives no lower bound
    rank = layout.rank(shape)
    floor = rank.prefill_flops(prompt) / gpu.flops_per_s(shape.compute_dtype) / layout.pipeline
    if ttft is not None and ttft < floor:
        raise ServebookError(
            f"TTFT of {ttft * 1e3:.1f} ms is below the compute floor of {floor * 1e3:.1f} ms ({gpu.name})",
            where,
            "The prefix cache held the prompt, or the parameters name another model or hardware than was measured",
        )
    read = rank.decode_weight_bytes / gpu.bytes_per_s
    if tpot is not None and (point.concurrency or 1) == 1 and tpot < read:
        raise ServebookError(
            f"TPOT of {tpot * 1e3:.2f} ms is below the {read * 1e3:.2f} ms that reading the weights takes ({gpu.name})",
            where,
            "The parameters name another model or hardware than was measured",
        )
    return clean


def reject_contradictions(points: Sequence[MeasuredPoint]) -> None:
    """Raises ServebookError if two C = 1 points contradict each other."""
    ordered = sorted(points, key=lambda p: p.prompt_tokens)
    for a, b in itertools.pairwise(ordered):
        same = lengths(a) == lengths(b)
        for name, first, second in (
            ("ttft_mean_s", a.ttft_mean_s, b.ttft_mean_s), ("tpot_mean_s", a.tpot_mean_s, b.tpot_mean_s)
        ):  # fmt: skip
            if not (first and second):
                continue
            ratio = second / first
            if ratio < 1 / 1.5 or (same and ratio > 1.5):
                raise ServebookError(
                    f"{name} is {first:.4g} s at {a.prompt_tokens} prompt tokens and {second:.4g} s at "
                    f"{b.prompt_tokens}: the points contradict each other",
                    "calibration",
                    "Measure both again on an idle machine",
                )
