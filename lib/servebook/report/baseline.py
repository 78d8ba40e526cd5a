"""The kept run that a run with other number types is set against: the same served without them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..common import stats
from ..run_folder import results, stored_params
from ..scoring import score

SAME = ("hub", "path", "config", "revision")  # of the model
LOAD = ["kind", "concurrency", "rate_per_s", "prompt_tokens", "output_tokens"]


@dataclass(frozen=True)
class Baseline:
    """Another run of the same model on the same GPU, and the points that both measured under the same load."""

    name: str
    what: str  # what this run has and the other has not: "fp8 weights"
    against: str  # what the other has instead: "bfloat16 weights"
    ratios: pd.DataFrame  # one row a point: LOAD, ratio of output rates with low and high, the rates, verdicts


def beside(run_dir: Path | str, engine: str) -> Baseline | None:
    """A run in a neighbouring folder that differs only in the type of weights or KV cache; None if there is none,
    or if it shares no point."""
    run_dir = Path(run_dir)
    own = _params(run_dir)
    if own is None or not (what := _types(own)):
        return None
    for folder in sorted(run_dir.resolve().parent.iterdir()):
        other = _params(folder) if folder != run_dir.resolve() else None
        if other is None or _types(other) or any(own["model"].get(k) != other["model"].get(k) for k in SAME):
            continue
        if own["hardware"].get("gpu") != other["hardware"].get("gpu"):
            continue
        ratios = _ratios(run_dir, folder, engine)
        if len(ratios):
            kinds = "weights" if "weights" in what else "KV cache"
            return Baseline(other["run"], what, f"{other['model'].get('dtype', 'bfloat16')} {kinds}", ratios)
    return None


def _params(folder: Path) -> dict[str, Any] | None:
    if not folder.is_dir() or not (read := stored_params.read(folder)):
        return None
    return read if "model" in read and "hardware" in read else None


def _types(run: dict[str, Any]) -> str:
    found = [f"{q} weights"] if (q := run["model"].get("quantization")) else []
    found += ["fp8 KV cache"] if run["model"].get("kv_cache_dtype") == "fp8" else []
    return " and ".join(found)


def _ratios(run_dir: Path, folder: Path, engine: str) -> pd.DataFrame:
    frames = []
    for where in (run_dir, folder):
        frame = score.complete_frame(results.read_points(where))
        frame = frame[(frame["engine"] == engine) & (frame["sweep"] != "calibration") & (frame["verdict"] != "invalid")]
        frame = frame[~score.is_repeated(frame) & (frame["output_tok_per_s"] > 0)]
        keep = [*LOAD, "output_tok_per_s", "output_tok_per_s_ci_low", "output_tok_per_s_ci_high", "verdict", "point"]
        frames.append(frame[keep].drop_duplicates(LOAD))
    both = frames[0].merge(frames[1], on=LOAD, suffixes=("", "_base"))
    both = both[both["kind"] == "concurrency"]
    ratios = both["output_tok_per_s"] / both["output_tok_per_s_base"]
    spans = [
        stats.ratio_interval(
            ratio, *((r[f"output_tok_per_s_ci_low{t}"], r[f"output_tok_per_s_ci_high{t}"]) for t in ("", "_base"))
        )
        for ratio, (_, r) in zip(ratios, both.iterrows(), strict=True)
    ]
    low, high = zip(*spans, strict=True) if spans else ((), ())
    return both.assign(ratio=ratios, low=low, high=high).reset_index(drop=True)


__all__ = ["Baseline", "beside"]
