"""`servebook model`: describes a model and whether it fits a GPU. Needs no GPU, and for a file no network."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..common.errors import ServebookError
from ..config.params import HardwareParams, ModelParams
from ..hardware import catalog
from ..model import reader
from ..model.shape import ModelShape
from ..predictor import fit


def main(options: Namespace) -> int:
    """Print every model that can be read; 1 if one cannot."""
    gpu = catalog.resolve(HardwareParams(gpu=options.gpu)) if options.gpu else None
    for option, value in (("--gpus", options.gpus), ("--context", options.context)):
        if value is not None and value < 1:
            raise ServebookError(f"{value} is too few", option, "Give at least 1")
    cards = {gpu.name: gpu} if gpu else catalog.catalog()
    found, faults = [], 0
    for source in options.models:
        try:
            shape = shape_of(source, options.dtype, options.quantization, options.kv_cache_dtype)
            report = fit.report(shape, cards, gpu=gpu, gpus=options.gpus, context=options.context)
        except ServebookError as error:
            if len(options.models) == 1:
                raise
            print(f"servebook: {error}", file=sys.stderr)
            faults += 1
            continue
        if options.json:
            found.append(report)
        else:
            print(text(report, shape))
    if options.json:
        print(json.dumps(found[0] if len(options.models) == 1 else found, indent=1))
    return 1 if faults else 0


def shape_of(source: str, dtype: str, quantization: str | None, kv_cache_dtype: str) -> ModelShape:
    """The shape of a config.json, a folder, a packaged name or a Hub id. Raises ServebookError."""
    path = Path(source).expanduser()
    settings: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise ServebookError(f"not valid JSON ({e})", source, "Give a Hugging Face config.json") from None
        folder = path.resolve().parent
        name = folder.name if path.name == "config.json" else path.stem
        return reader.from_config(config, name=name, source=source, sidecar=reader.read_sidecar(folder), **settings)
    if path.is_dir():
        return reader.read_shape(ModelParams(path=str(path.resolve()), **settings), Path())
    if source in reader.packaged():
        return reader.read_shape(ModelParams(config=source, weights="dummy", **settings), Path())
    if source.count("/") != 1 or source.startswith((".", "/", "~")) or source.endswith(".json"):
        raise ServebookError(
            "no such file, folder or packaged model", source, f"Packaged are {', '.join(reader.packaged())}"
        )
    return reader.read_shape(ModelParams(hub=source, **settings), Path())


def text(report: dict[str, Any], shape: ModelShape) -> str:
    """The description as text."""
    gib = 2**30
    r, size = report, f"{report['parameters'] / 1e9:,.2f}e9 parameters"
    if r["active_parameters"] != r["parameters"]:
        size += f", {r['active_parameters'] / 1e9:,.2f}e9 active a token"
    stored = r["quantization"] if r["quantization"] != "none" else r["dtype"]
    lines = [
        f"{r['model']} ({r['architecture']}): {size}",
        f"  weights           {r['weight_bytes'] / gib:,.2f} GiB ({stored})",
        f"  KV cache          {r['kv_bytes_per_token']:,} bytes a token: {_kinds(shape)}",
    ]
    if r["state_bytes_per_sequence"]:
        lines.append(f"  states            {r['state_bytes_per_sequence'] / 2**20:,.1f} MiB a sequence")
    if r["experts"]:
        lines.append(f"  experts           {r['experts']['per_token']} of {r['experts']['count']} a token and layer")
    lines.append(f"  longest context   {r['max_context_tokens']:,} tokens")
    if r["gpu"]:
        pool = f"{r['kv_cache_tokens']:,} tokens, {r['max_concurrency']:.2f} requests of {r['context_tokens']:,}"
        lines.append(f"  on {r['gpus']} × {r['gpu']}: {r['problem'] or pool}")
    held: dict[Any, list[str]] = {}
    for card, n in r["fewest_gpus"].items():
        held.setdefault(n, []).append(card)
    for n in sorted(held, key=lambda n: n or 99):
        lines.append(f"  {f'fits {n} of' if n else 'not even 16 of':<16}  {', '.join(held[n])}")
    return "\n".join([*lines, *(f"  note: {note}" for note in r["notes"])])


def _kinds(shape: ModelShape) -> str:
    words = []
    for a in shape.attention:
        window = f" (window {a.window:,})" if a.window else f" (chooses {a.limit:,})" if a.limit else ""
        words.append(f"{a.layers} {a.kind}{window}")
    return ", ".join(words) + " layers"
