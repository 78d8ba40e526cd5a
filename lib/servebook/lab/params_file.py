"""An exploration as a parameter file: what is turned on the screen, ready for `servebook plan` and `servebook run`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from .. import model
from ..common import files
from ..common.errors import ServebookError
from ..config.params import RunParams
from ..config.strict_yaml import validate
from .setting import SERVING, Setting


def text(s: Setting, concurrency: Iterable[int] = ()) -> str:
    """The YAML of a run that measures a setting: its C = 1 point, then its load.

    concurrency: values of the sweep; None: the setting's own. Raises ServebookError for a GPU that is not in the
    catalog."""
    if not isinstance(s.gpu, str):
        raise ServebookError(
            f"{s.gpu.name} is not in the catalog",
            "gpu",
            "Write hardware.figures into a file of your own",
        )
    where = "config" if s.model in model.packaged() else "path" if Path(s.model).expanduser().is_dir() else "hub"
    shape: dict[str, Any] = {where: s.model, "weights": "dummy" if where == "config" else "real"}
    shape |= {k: v for k in ("quantization", "dtype") if (v := getattr(s, k))}
    shape |= {"kv_cache_dtype": s.kv_cache_dtype} if s.kv_cache_dtype != "auto" else {}
    engine: dict[str, Any] = {"kind": "naive" if s.naive else "vllm"}
    if not s.naive:
        engine |= {k: v for k in SERVING if (v := getattr(s, k)) not in (None, 1)}
    hardware: dict[str, Any] = {"gpu": s.gpu}
    if s.price_per_hour:
        hardware["price_per_hour"] = float(s.price_per_hour * s.gpus)
    lengths = {"prompt_tokens": s.prompt_tokens, "output_tokens": s.output_tokens}
    if s.rate_per_s:
        sweep: dict[str, Any] = {"kind": "arrival_rate", **lengths, "rates_per_s": [float(s.rate_per_s)]}
    else:
        sweep = {"kind": "concurrency", **lengths, "concurrency": list(concurrency) or [s.concurrency]}
    level = {k: v for k, v in (("ttft_s", s.ttft_slo_s), ("tpot_s", s.tpot_slo_s)) if v}
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in f"{Path(s.model).name}-{s.gpu}").lower()
    params: dict[str, Any] = {
        "run": name, "title": f"{Path(s.model).name} on {s.gpu}", "model": shape, "hardware": hardware,
        "engines": {"hf" if s.naive else "vllm": engine}, "calibration": [{**lengths, "requests": 4}],
        "sweeps": {"load": sweep}, **({"slo": level} if level else {}),
    }  # fmt: skip
    written = yaml.safe_dump(params, sort_keys=False)
    validate(written, RunParams, f"{name}.yaml")
    return written


def write(s: Setting, path: str | Path, concurrency: Iterable[int] = ()) -> Path:
    """The same as a file."""
    return files.write_text(Path(path), text(s, concurrency))


__all__ = ["text", "write"]
