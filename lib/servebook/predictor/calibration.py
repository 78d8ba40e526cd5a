"""Fits the constants of a step-time model, with their uncertainty, to C = 1 points; without points, to the datasheet.

Maximum a posteriori: least squares over (log-residuals of TTFT and TPOT, front-end seconds) and (constant − prior)/sd,
inside hard physical bounds; the posterior is Gaussian (Laplace approximation). Constants that the data do not determine
stay near their priors, and a note lists them. One module: a fit and its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ..common.errors import ServebookError
from ..common.measured_point import MeasuredPoint
from ..hardware.catalog import Gpu
from ..model.reader import ModelShape
from .calibration_points import lengths, reject_contradictions, relative_sd, server_prefill, usable_figures
from .parallel import ALONE, Layout
from .priors import HOST_NOISE, Prior, naive_priors, vllm_priors
from .steptime import NaiveTimes, VllmTimes

Z80 = 1.2816  # half-width of an 80 % interval in standard deviations
TPOT_SD, TTFT_SD = 0.01, 0.015  # relative sd of the step-time model's own error at C = 1
CPU_NOISE = 8.0  # factor on these for a CPU, which is shared with the client and other processes
FRONTEND_SD_S, FRONTEND_SD = 0.001, 0.05  # sd of client TTFT − server prefill − server queue: seconds, and relative
SIMULATED_SD = 0.04  # relative sd of the simulation's error at C > 1
# factors on SIMULATED_SD. TTFT at C > 1 depends on when requests coincide: together with COMMON_SD its sd is 0.20, as
# large as the model's error on loads of others (intervals.FORM_ERROR). An output rate also holds a run's start and end
# and its client's pauses: on published servers its error at the least load says nothing of the errors at other loads.
# Outliers (undocumented lengths or a warm cache) get little weight (Huber)
CROWD = (("ttft", "ttft_mean_s", 4.75), ("tpot", "tpot_mean_s", 1.0), ("output", "output_tok_per_s", 2.5))
HUBER = 1.5
# sd of the error that all points at C > 1 of one server share (when requests coincide, undocumented lengths). Their
# residuals are correlated, so such points are not independent evidence
COMMON_SD = {"ttft": 0.06, "tpot": 0.02, "output": 0.03}
GAUSS_NEWTON_STEPS, DIFFERENCE = 2, 0.5  # DIFFERENCE: step of the numerical derivative, in prior sds
IMPOSSIBLE = 2.5  # a point that the best fit misses by this factor was not measured on this model and machine
# posterior sd / prior sd below which a constant counts as learned; |correlation| above which two cannot be separated
LEARNED, ALIKE = 0.9, 0.8


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
    """Constants with uncertainty. stage: "datasheet" or "calibrated"; residuals: (figure, predicted / measured − 1)."""

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
        """Draws from the posterior, in antithetic pairs, clipped to the physical bounds."""
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


AnyTimes = VllmTimes | NaiveTimes
Build = Callable[[Mapping[str, float]], AnyTimes]
# (times, point) → {"ttft": s, "tpot": s, "output": tokens/s}, or some of these
Simulate = Callable[[AnyTimes, MeasuredPoint], Mapping[str, float]]


def calibrate(
    kind: str,
    shape: ModelShape,
    gpu: Gpu,
    points: Sequence[MeasuredPoint] = (),
    *,
    facts: Mapping[str, Any] | None = None,
    budget: int = 2048,
    layout: Layout = ALONE,
    times: Build | None = None,
    simulated: Simulate | None = None,
    priors: dict[str, Prior] | None = None,
) -> Calibration:
    """The constants of an engine ("naive", else vLLM's) fitted to measured points; without points, the priors.

    budget: max_num_batched_tokens. times: constants → step times of the measured server, with its CUDA graphs and
    scheduling (PredictedServer.times); None: with vLLM's defaults. simulated: (times, point) → {"ttft": s, "tpot": s,
    "output": tokens/s} of a point at C > 1; None: points at C > 1 are not used. Raises ServebookError for points that
    are physically impossible.
    """
    naive = kind == "naive"
    priors = priors or (naive_priors(shape, gpu) if naive else vllm_priors(shape, gpu, facts, layout))
    names = tuple(priors)

    def default(constants: Mapping[str, float]) -> AnyTimes:
        return NaiveTimes(shape, gpu, constants) if naive else VllmTimes(shape, gpu, constants, layout)

    usable = [clean for p in points if (clean := usable_figures(p, shape, gpu, layout))]
    fit = _Fit(
        priors,
        times or default,
        budget,
        CPU_NOISE if gpu.is_cpu else 1.0,
        [p for p in usable if (p.concurrency or 1) == 1],
        [p for p in usable if (p.concurrency or 1) > 1 and simulated is not None],
        simulated,
    )
    reject_contradictions(fit.alone)
    if not fit.alone and not fit.crowd:
        covariance = np.diag(fit.sd**2)
        return _calibration("datasheet", priors, names, fit.mean, covariance, fit.bounds, [], len(points) > 0)
    found, covariance, misfit = fit.solve()
    for m in misfit:
        factor = math.exp(abs(m.off))
        if not m.crowd and factor > IMPOSSIBLE * (2 if gpu.is_cpu else 1):
            raise ServebookError(
                f"no physically possible constants explain {m.figure} (off by {factor:.1f}×)",
                "calibration",
                "Measure these points again on an idle machine, or check model and hardware in the parameters",
            )
    residuals = [(m.figure, math.expm1(m.off)) for m in misfit]
    return _calibration("calibrated", priors, names, found, covariance, fit.bounds, residuals, False)


class Misfit(NamedTuple):
    """How far the fit is off one measured figure: log(predicted / measured), for FRONT_END the difference in seconds.
    at: the load; crowd: a point at C > 1."""

    metric: str
    at: str
    off: float
    sd: float
    crowd: bool = False

    @property
    def figure(self) -> str:
        return f"{self.metric} {self.at}"


FRONT_END = "front end"


class _Fit:
    """The least-squares problem. Its variables are the constants, in standard deviations from their priors. alone:
    points at C = 1; crowd: points at C > 1, which need a simulation."""

    def __init__(
        self,
        priors: dict[str, Prior],
        build: Build,
        budget: int,
        noisier: float,
        alone: Sequence[MeasuredPoint],
        crowd: Sequence[MeasuredPoint],
        simulated: Simulate | None,
    ) -> None:
        self._names, self._build, self._budget, self._noisier = tuple(priors), build, budget, noisier
        self.alone, self.crowd, self._simulated = alone, crowd, simulated
        self.mean = np.array([p.value for p in priors.values()])
        self.sd = np.array([p.sd for p in priors.values()])
        self.bounds = np.array([[p.low for p in priors.values()], [p.high for p in priors.values()]])
        before = self._times(np.zeros(len(self._names)))
        self._launch_bound = {lengths(p): before.launch_bound(p.prompt_tokens, budget) for p in alone}

    def _times(self, x: np.ndarray) -> AnyTimes:
        return self._build(dict(zip(self._names, self.mean + self.sd * x, strict=True)))

    def solve(self) -> tuple[np.ndarray, np.ndarray, list[Misfit]]:
        """(constants, their covariance, what is left)"""
        from scipy.optimize import least_squares

        edge = (self.bounds - self.mean) / self.sd

        def residuals(x: np.ndarray) -> np.ndarray:
            off = _apart(self._misfit(x))
            return np.array([*x, *(_softened(z) if self.crowd else z for z in off)])

        if self.crowd:
            x, jacobian = _gauss_newton(residuals, edge)
        else:
            begin = np.clip(np.zeros(len(self._names)), edge[0], edge[1])
            fit = least_squares(residuals, begin, bounds=(edge[0] - 1e-6, edge[1] + 1e-6), x_scale=1.0)
            x, jacobian = fit.x, fit.jac
        covariance = np.linalg.inv(jacobian.T @ jacobian) * np.outer(self.sd, self.sd)
        found = np.clip(self.mean + self.sd * x, self.bounds[0], self.bounds[1])
        misfit = self._misfit(x)
        return found, covariance, [m for m in misfit if m.metric != FRONT_END]

    def _misfit(self, x: np.ndarray) -> list[Misfit]:
        times = self._times(x)
        out = [m for p in self.alone for m in self._alone_misfit(times, p)]
        for p in self.crowd:
            assert self._simulated is not None
            at, figures = f"C={p.concurrency} {lengths(p)}", self._simulated(times, p)
            for metric, key, loose in CROWD:
                measured = getattr(p, key)
                if measured and figures.get(metric, 0.0) > 0:
                    off = math.log(figures[metric] / measured)
                    out.append(Misfit(metric, at, off, loose * self._noisier * SIMULATED_SD, crowd=True))
        return out

    def _alone_misfit(self, times: AnyTimes, p: MeasuredPoint) -> list[Misfit]:
        prompt, output, label = p.prompt_tokens, p.output_tokens, lengths(p)
        bound, out = self._launch_bound[label], []
        if p.ttft_mean_s is not None:  # None: not used, as the prefix cache shortened it
            first = times.prefill(prompt) if isinstance(times, NaiveTimes) else times.first_token(prompt, self._budget)
            front = times.frontend(prompt) + times.first_event(prompt)
            interval = p.ttft_mean_s, p.ttft_ci_low_s, p.ttft_ci_high_s
            ttft_sd = relative_sd(*interval, self._noisier * TTFT_SD, HOST_NOISE * bound[0])
            if (server := server_prefill(p)) is None:
                out.append(Misfit("ttft", label, math.log((front + first) / p.ttft_mean_s), ttft_sd))
            else:
                front_sd = FRONTEND_SD_S + self._noisier * FRONTEND_SD * server[1]
                out.append(Misfit("prefill", label, math.log(first / server[0]), ttft_sd))
                out.append(Misfit(FRONT_END, label, front - server[1], front_sd))
        if output > 1 and p.tpot_mean_s:
            interval = p.tpot_mean_s, p.tpot_ci_low_s, p.tpot_ci_high_s
            tpot_sd = relative_sd(*interval, self._noisier * TPOT_SD, HOST_NOISE * bound[1])
            off = math.log(times.per_token(prompt, output) / p.tpot_mean_s)
            out.append(Misfit("tpot", label, off, tpot_sd))
        return out


def _apart(misfit: Sequence[Misfit]) -> list[float]:
    """The misfits in standard deviations. Those at C > 1 share an error of COMMON_SD per metric: they are whitened
    with the covariance s²·I + COMMON_SD²."""
    out = [m.off / m.sd for m in misfit]
    for metric, common in COMMON_SD.items():
        at = [i for i, m in enumerate(misfit) if m.crowd and m.metric == metric]
        if at:
            s = misfit[at[0]].sd
            mean = sum(misfit[i].off for i in at) / len(at)
            kept = s / math.sqrt(s**2 + len(at) * common**2)
            for i in at:
                out[i] = (misfit[i].off - (1 - kept) * mean) / s
    return out


def _softened(z: float) -> float:
    """The residual whose square is the Huber loss of z."""
    return z if abs(z) <= HUBER else math.copysign(math.sqrt(2 * HUBER * abs(z) - HUBER**2), z)


def _gauss_newton(residuals: Callable[[np.ndarray], np.ndarray], edge: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x, jacobian) of a least-squares fit to a simulation's residuals. They are noisy, so derivatives are taken over
    DIFFERENCE prior sds. Takes few steps, each accepted only if the sum of squares decreases."""
    n = edge.shape[1]
    x = np.clip(np.zeros(n), edge[0], edge[1])
    now = residuals(x)
    jacobian = np.zeros((len(now), n))
    for _ in range(GAUSS_NEWTON_STEPS):
        for i in range(n):
            step = DIFFERENCE if x[i] + DIFFERENCE <= edge[1][i] else -DIFFERENCE
            moved = x.copy()
            moved[i] += step
            jacobian[:, i] = (residuals(moved) - now) / step
        ahead = np.linalg.lstsq(jacobian, -now, rcond=None)[0]
        for share in (1.0, 0.5, 0.25):
            there = np.clip(x + share * ahead, edge[0], edge[1])
            then = residuals(there)
            if then @ then < now @ now:
                x, now = there, then
                break
        else:
            break
    return x, jacobian


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
        why = "the given points have no usable values" if unusable else "no measurement"
        notes.append(f"{why}: every constant is a prior")
    else:
        undetermined = [n for n in names if not estimates[n].sd_ratio < LEARNED]
        correlation = covariance / np.outer(sds, sds)
        pairs = [
            (a, b, float(correlation[i, j]))
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i < j and abs(correlation[i, j]) > ALIKE
        ]
        if undetermined:
            notes.append(f"the data do not determine {', '.join(undetermined)}: they stay near their priors")
        notes += [f"the data cannot tell {a} from {b} (correlation {c:+.2f})" for a, b, c in pairs]
        notes += [f"the fit misses {what} by {100 * r:+.0f} %" for what, r in residuals if abs(r) > 0.1]
        notes += [
            f"{n} is at its physical bound {0 if abs(e.value) < 1e-9 else e.value:.3g}"
            for n, e in estimates.items()
            if min(e.value - priors[n].low, priors[n].high - e.value) < 1e-6 * priors[n].high
        ]
    return Calibration(stage, estimates, pairs, residuals, notes, names, mean, covariance, bounds)
