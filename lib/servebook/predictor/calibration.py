"""Constants of a step-time model from C = 1 points, or from nothing but the datasheet, with their uncertainty.

Maximum a posteriori: least squares over (log-residuals of TTFT and TPOT, front-end seconds) and (constant − prior)/sd,
inside hard physical bounds; the posterior is Gaussian by Laplace's approximation. What the data cannot tell apart
stays at its prior and is said so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..common.errors import ServebookError
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .parallel import ALONE, Layout
from .priors import HOST_NOISE, Prior, naive_priors, vllm_priors
from .steptime import NaiveTimes, VllmTimes

Z80 = 1.2816  # half-width of an 80 % interval in standard deviations
TPOT_SD, TTFT_SD = 0.01, 0.015  # how well the step-time form itself holds at C = 1 (relative)
CPU_NOISE = 8.0  # a CPU shared with the client and whatever else runs varies that much more
FRONTEND_SD_S, FRONTEND_SD = 0.001, 0.05  # of the front-end time left over from the server's histograms
SIMULATED_SD = 0.04  # of a point at C > 1
IMPOSSIBLE = 2.5  # a point that the best fit misses by this factor was not measured on this model and machine
HIT_SHARE = 0.02  # prefix-cache hits above which a TTFT is not a prefill
LEARNED, ALIKE = 0.9, 0.8  # posterior/prior sd under which the data said something; |correlation| they can't resolve


@dataclass(frozen=True)
class Estimate:
    """A constant after calibration: value, sd, 80 % interval, its prior, and posterior sd / prior sd."""

    value: float
    sd: float
    low: float
    high: float
    prior: float
    prior_sd: float
    sd_ratio: float
    unit: str
    why: str


@dataclass(frozen=True)
class Calibration:
    """Constants with uncertainty. stage: "datasheet" or "calibrated"; residuals: (what, predicted / measured − 1)."""

    stage: str
    estimates: dict[str, Estimate]
    correlations: list[tuple[str, str, float]]
    residuals: list[tuple[str, float]]
    notes: list[str]
    _names: tuple[str, ...]
    _mean: np.ndarray
    _covariance: np.ndarray
    _bounds: np.ndarray

    @property
    def constants(self) -> dict[str, float]:
        return {n: e.value for n, e in self.estimates.items()}

    def samples(self, count: int, seed: int = 1) -> list[dict[str, float]]:
        """Draws from the posterior, in antithetic pairs, cut to the physical bounds."""
        half = np.random.default_rng(seed).standard_normal((-(-count // 2), len(self._names)))
        z = np.concatenate([half, -half])[:count]
        root = np.linalg.cholesky(self._covariance + 1e-18 * np.eye(len(self._names)))
        draws = np.clip(self._mean + z @ root.T, self._bounds[0], self._bounds[1])
        return [dict(zip(self._names, map(float, row), strict=True)) for row in draws]

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "constants": {n: asdict(e) for n, e in self.estimates.items()},
            "cannot_tell_apart": [{"a": a, "b": b, "correlation": round(c, 3)} for a, b, c in self.correlations],
            "residuals": [{"of": what, "error_share": round(r, 4)} for what, r in self.residuals],
            "notes": self.notes,
        }


def calibrate(
    kind: str,
    shape: ModelShape,
    gpu: Gpu,
    points: Sequence[Mapping[str, Any]] = (),
    *,
    facts: Mapping[str, Any] | None = None,
    budget: int = 2048,
    layout: Layout = ALONE,
    captured_tokens: int = 512,
    simulated: Callable[[VllmTimes | NaiveTimes, Mapping[str, Any]], tuple[float, float]] | None = None,
    priors: dict[str, Prior] | None = None,
) -> Calibration:
    """Fit the constants of an engine ("naive", else vLLM's) to measured points; none: the datasheet's priors.

    points: measured point objects with concurrency, prompt_tokens, output_tokens, ttft_mean_s, tpot_mean_s and, where
    known, server_prefill_mean_s and server_queue_mean_s. budget: max_num_batched_tokens. layout, captured_tokens: as
    of VllmTimes. simulated: (times, point) → (ttft_s, tpot_s) for points at C > 1, which are left out without it.
    Raises ServebookError for impossible points.
    """
    naive, noisier = kind == "naive", CPU_NOISE if gpu.is_cpu else 1.0
    priors = priors or (naive_priors(shape, gpu) if naive else vllm_priors(shape, gpu, facts, layout))
    names = tuple(priors)
    mean = np.array([p.value for p in priors.values()])
    sd = np.array([p.sd for p in priors.values()])
    bounds = np.array([[p.low for p in priors.values()], [p.high for p in priors.values()]])
    usable = [clean for p in points if (clean := _check(p, shape, gpu, layout))]
    alone = [p for p in usable if (p.get("concurrency") or 1) == 1]
    crowd = [p for p in usable if (p.get("concurrency") or 1) > 1 and simulated is not None and p["ttft_mean_s"]]
    _contradictions(alone)
    if not alone and not crowd:
        covariance = np.diag(sd**2)
        return _calibration("datasheet", priors, names, mean, covariance, bounds, [], len(points) > 0)

    def build(x: np.ndarray) -> VllmTimes | NaiveTimes:
        constants = dict(zip(names, mean + sd * x, strict=True))
        if naive:
            return NaiveTimes(shape, gpu, constants)
        return VllmTimes(shape, gpu, constants, layout, captured_tokens)

    def misfit(x: np.ndarray) -> list[tuple[str, float, float]]:
        """(what, log(predicted / measured) or seconds, its sd)"""
        times, out = build(x), []
        for p in alone:
            prompt, output = int(p["prompt_tokens"]), int(p["output_tokens"])
            label = f"{prompt}/{output}"
            first = times.prefill(prompt) if isinstance(times, NaiveTimes) else times.first_token(prompt, budget)
            front = times.frontend(prompt) + times.first_event(prompt)
            server = _server_prefill(p)
            ttft_sd = _noise(p, "ttft", noisier * TTFT_SD, HOST_NOISE * bound[label][0])
            if p["ttft_mean_s"] is None:
                pass  # shortened by the prefix cache
            elif server is None:
                out.append((f"ttft {label}", math.log((front + first) / p["ttft_mean_s"]), ttft_sd))
            else:
                out.append((f"prefill {label}", math.log(first / server[0]), ttft_sd))
                out.append((f"front end {label}", front - server[1], FRONTEND_SD_S + noisier * FRONTEND_SD * server[1]))
            if output > 1 and p.get("tpot_mean_s"):
                predicted = times.per_token(prompt, output)
                tpot_sd = _noise(p, "tpot", noisier * TPOT_SD, HOST_NOISE * bound[label][1])
                out.append((f"tpot {label}", math.log(predicted / p["tpot_mean_s"]), tpot_sd))
        for p in crowd:
            assert simulated is not None and p["ttft_mean_s"]
            label = f"C={p['concurrency']} {p['prompt_tokens']}/{p['output_tokens']}"
            ttft, tpot = simulated(times, p)
            out.append((f"ttft {label}", math.log(ttft / p["ttft_mean_s"]), 1.5 * noisier * SIMULATED_SD))
            if p.get("tpot_mean_s"):
                out.append((f"tpot {label}", math.log(tpot / p["tpot_mean_s"]), noisier * SIMULATED_SD))
        return out

    from scipy.optimize import least_squares

    before = build(np.zeros(len(names)))
    bound = {
        f"{p['prompt_tokens']}/{p['output_tokens']}": before.launch_bound(p["prompt_tokens"], budget) for p in alone
    }
    edge = (bounds - mean) / sd
    fit = least_squares(
        lambda x: np.array([*x, *(r / s for _, r, s in misfit(x))]),
        np.clip(np.zeros(len(names)), edge[0], edge[1]),
        bounds=(edge[0] - 1e-6, edge[1] + 1e-6),
        diff_step=1e-3 if crowd else None,
        x_scale=1.0,
    )
    covariance = np.linalg.inv(fit.jac.T @ fit.jac) * np.outer(sd, sd)
    found = np.clip(mean + sd * fit.x, bounds[0], bounds[1])
    residuals = []
    for what, r, _ in misfit(fit.x):
        if "front end" in what:
            continue
        residuals.append((what, math.expm1(r)))
        if abs(r) > math.log(IMPOSSIBLE * (2 if gpu.is_cpu else 1)):
            raise ServebookError(
                f"no physically possible constants explain {what} (off by {math.exp(abs(r)):.1f}×)",
                "calibration",
                "Measure these points again on an idle machine, or check model and hardware in the parameters",
            )
    return _calibration("calibrated", priors, names, found, covariance, bounds, residuals, False)


def _calibration(
    stage: str,
    priors: dict[str, Prior],
    names: tuple[str, ...],
    mean: np.ndarray,
    covariance: np.ndarray,
    bounds: np.ndarray,
    residuals: list[tuple[str, float]],
    unusable: bool,
) -> Calibration:
    sds = np.sqrt(np.diag(covariance))
    estimates = {}
    for i, (name, p) in enumerate(priors.items()):
        low, high = np.clip([mean[i] - Z80 * sds[i], mean[i] + Z80 * sds[i]], p.low, p.high)
        estimates[name] = Estimate(
            float(mean[i]), float(sds[i]), float(low), float(high), p.value, p.sd, float(sds[i] / p.sd), p.unit, p.why
        )
    notes: list[str] = []
    pairs: list[tuple[str, str, float]] = []
    if stage == "datasheet":
        why = "the points given hold no usable figure" if unusable else "no measurement"
        notes.append(f"{why}: every constant is a prior")
    else:
        told = [n for n in names if estimates[n].sd_ratio < LEARNED]
        untold = [n for n in names if n not in told]
        correlation = covariance / np.outer(sds, sds)
        pairs = [
            (a, b, float(correlation[i, j]))
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i < j and abs(correlation[i, j]) > ALIKE
        ]
        if untold:
            notes.append(f"the data say nothing of {', '.join(untold)}: they stay at their priors")
        notes += [f"the data cannot tell {a} from {b} (correlation {c:+.2f})" for a, b, c in pairs]
        notes += [f"the fit misses {what} by {100 * r:+.0f} %" for what, r in residuals if abs(r) > 0.1]
        notes += [
            f"{n} lies on its physical bound {e.value:.3g}"
            for n, e in estimates.items()
            if min(e.value - priors[n].low, priors[n].high - e.value) < 1e-6 * priors[n].high
        ]
    return Calibration(stage, estimates, pairs, residuals, notes, names, mean, covariance, bounds)


def _noise(point: Mapping[str, Any], metric: str, form: float, host: float) -> float:
    """Relative sd of a measured mean: its 95 % interval where there is one, what the form itself can't do, the host."""
    floor = math.hypot(form, host)
    low, high, mean = (point.get(f"{metric}_{k}_s") for k in ("ci_low", "ci_high", "mean"))
    if low is None or high is None or not mean or not high > low:
        return floor
    return math.hypot(floor, (high - low) / 3.92 / mean)


def _server_prefill(point: Mapping[str, Any]) -> tuple[float, float] | None:
    """(prefill, front end) seconds from vLLM's own histograms: front end = client TTFT − prefill − queue."""
    prefill, queue = point.get("server_prefill_mean_s"), point.get("server_queue_mean_s")
    if prefill is None or queue is None or point["ttft_mean_s"] is None or not prefill > 0:
        return None
    front = point["ttft_mean_s"] - prefill - queue
    usual = prefill + (point.get("ttft_p50_s") or point["ttft_mean_s"]) - point["ttft_mean_s"]
    return (usual, front) if front > 0 and usual > 0 else None


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str) or (isinstance(value, float) and math.isnan(value)):
        return None
    return float(value)


def _check(point: Mapping[str, Any], shape: ModelShape, gpu: Gpu, layout: Layout = ALONE) -> dict[str, Any] | None:
    """The point's usable figures, None where there are none. Raises ServebookError for what cannot have been measured.

    A TTFT that the prefix cache shortened is left out.
    """
    ttft, tpot = _number(point.get("ttft_mean_s")), _number(point.get("tpot_mean_s"))
    prompt, output = _number(point.get("prompt_tokens")), _number(point.get("output_tokens"))
    where = f"calibration point {point.get('engine') or ''} {point.get('prompt_tokens')}/{point.get('output_tokens')}"
    for name, seconds in (("ttft_mean_s", ttft), ("tpot_mean_s", tpot)):
        if seconds is not None and not (0 < seconds < math.inf):
            raise ServebookError(f"{name} is {seconds:g} s", where, "Times are positive: measure the point again")
    if (_number(point.get("cache_hit_share")) or 0.0) > HIT_SHARE:
        ttft = None
    if (ttft is None and tpot is None) or not prompt or not output or point.get("verdict") == "invalid":
        return None
    histograms = {k: _number(point.get(k)) for k in ("server_prefill_mean_s", "server_queue_mean_s")}
    intervals = {k: _number(v) for k, v in point.items() if "_ci_" in k}
    clean = {**point, **histograms, **intervals, "ttft_mean_s": ttft, "tpot_mean_s": tpot}
    clean |= {"prompt_tokens": int(prompt), "output_tokens": int(output)}
    if gpu.is_cpu:
        return clean  # its peak is an estimate, no floor
    rank = layout.rank(shape)
    floor = rank.prefill_flops(int(prompt)) / gpu.flops_per_s(shape.compute_dtype) / layout.pipeline
    if ttft is not None and ttft < floor:
        raise ServebookError(
            f"TTFT of {ttft * 1e3:.1f} ms is below the compute floor of {floor * 1e3:.1f} ms ({gpu.name})",
            where,
            "The prompt came from the prefix cache, or model or hardware in the parameters are not what was measured",
        )
    read = rank.decode_weight_bytes / gpu.bytes_per_s
    if tpot is not None and (point.get("concurrency") or 1) == 1 and tpot < read:
        raise ServebookError(
            f"TPOT of {tpot * 1e3:.2f} ms is below the {read * 1e3:.2f} ms that reading the weights takes ({gpu.name})",
            where,
            "Model or hardware in the parameters are not what was measured",
        )
    return clean


def _contradictions(points: Sequence[Mapping[str, Any]]) -> None:
    """Raises ServebookError where two C = 1 points cannot both be true."""
    ordered = sorted(points, key=lambda p: p["prompt_tokens"])
    for a, b in itertools.pairwise(ordered):
        same = (a["prompt_tokens"], a["output_tokens"]) == (b["prompt_tokens"], b["output_tokens"])
        for key in ("ttft_mean_s", "tpot_mean_s"):
            if not (a.get(key) and b.get(key)):
                continue
            ratio = b[key] / a[key]
            if ratio < 1 / 1.5 or (same and ratio > 1.5):
                raise ServebookError(
                    f"{key} is {a[key]:.4g} s at {a['prompt_tokens']} prompt tokens and {b[key]:.4g} s at "
                    f"{b['prompt_tokens']}: the points contradict each other",
                    "calibration",
                    "Measure both again on an idle machine",
                )
