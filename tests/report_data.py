"""Synthetic runs for the chart, score and report tests: the run folder's shapes, values from closed forms."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PARAMS = SimpleNamespace(  # as much of a run's parameters as the first screen asks for
    run="fixture",
    model=SimpleNamespace(
        hub="Qwen/Qwen2.5-7B", config=None, path=None, weights="real", dtype="bfloat16", quantization=None,
        kv_cache_dtype="auto",
    ),
    hardware=SimpleNamespace(price_per_hour=0.4, currency="USD"),
    engines={"naive": SimpleNamespace(kind="naive"), "vllm": SimpleNamespace(kind="vllm")},
    sweeps={},
)  # fmt: skip
CONCURRENCY_DEMO = (1, 2, 4, 8)
CONCURRENCY_FULL = (1, 2, 4, 8, 16, 32, 64, 128)


def _point(sweep: str, engine: str, point: str, **values: Any) -> dict[str, Any]:
    base = {
        "sweep": sweep, "engine": engine, "kind": "concurrency", "point": point, "concurrency": 1, "rate_per_s": None,
        "prompt_tokens": 512, "output_tokens": 128, "requests": 64, "failures": 0, "seconds": 30.0,
        "stop_reason": "requests", "verdict": "valid", "reasons": [], "started_at": "2026-01-02T03:04:05Z",
        "cache_hit_share": 0.0, "little_error": 0.004, "preemptions": 0,
    }  # fmt: skip
    return base | values


def _serve(engine: str, concurrency: int, prompt: int, output: int, noise: random.Random) -> dict[str, Any]:
    prefill = prompt * 1.6e-4
    wobble = 1 + noise.uniform(-0.03, 0.03)
    if engine == "naive":
        tpot = 0.0308 * wobble
        own = prefill * 1.1 + (output - 1) * tpot
        ttft = (concurrency - 1) * own + prefill * 1.1
        decode = 1 / tpot
    else:
        tpot = (0.028 + 0.00045 * concurrency + prefill * (concurrency - 1) / output) * wobble
        ttft = prefill * (1 + 0.35 * (concurrency - 1) ** 0.5) * wobble
        decode = concurrency / tpot
    e2e = ttft + (output - 1) * tpot
    rate = concurrency / e2e
    return {
        "ttft_mean_s": ttft, "ttft_p50_s": ttft * 0.96, "ttft_p90_s": ttft * 1.2, "ttft_p99_s": ttft * 1.9,
        "ttft_ci_low_s": ttft * 0.95, "ttft_ci_high_s": ttft * 1.06, "tpot_mean_s": tpot, "tpot_p50_s": tpot * 0.99,
        "tpot_p99_s": tpot * 1.4, "tpot_ci_low_s": tpot * 0.985, "tpot_ci_high_s": tpot * 1.015,
        "itl_p50_s": tpot * 0.97, "itl_p99_s": tpot * 3, "e2e_mean_s": e2e, "e2e_p50_s": e2e * 0.99,
        "e2e_p99_s": e2e * 1.25, "request_rate_per_s": rate, "output_tok_per_s": rate * output,
        "output_tok_per_s_ci_low": rate * output * 0.97, "output_tok_per_s_ci_high": rate * output * 1.03,
        "decode_tok_per_s": decode, "decode_wall_tok_per_s": rate * (output - 1), "in_flight_mean": concurrency * 0.999,
        "little_l": rate * e2e,
    }  # fmt: skip


def points(concurrency: tuple[int, ...] = CONCURRENCY_FULL, engines: tuple[str, ...] = ("naive", "vllm")) -> list[dict]:
    noise = random.Random(7)
    rows = []
    for engine in engines:
        for c in concurrency:
            if engine == "naive" and c > 16:
                continue
            rows.append(_point("c512", engine, f"c{c:04d}", concurrency=c, **_serve(engine, c, 512, 128, noise)))
            own = _serve(engine, c, 8192, 128, noise)
            rows.append(_point("c8192", engine, f"c{c:04d}", concurrency=c, prompt_tokens=8192, **own))
        for p in (128, 512, 2048, 8192):
            own = _serve(engine, 1, p, 64, noise)
            rows.append(
                _point("prompt", engine, f"p{p:05d}", kind="prompt_length", prompt_tokens=p, output_tokens=64, **own)
            )
        for r in (0.2, 0.5, 1.0):
            own = _serve(engine, int(1 + 4 * r), 512, 128, noise)
            rows.append(_point("rate", engine, f"r{r:.3f}", kind="arrival_rate", concurrency=None, rate_per_s=r, **own))
    return rows


def spoiled(rows: list[dict]) -> list[dict]:
    """The same run with a suspect and a failed point."""
    rows = [dict(r) for r in rows]
    vllm = [r for r in rows if r["engine"] == "vllm" and r["sweep"] == "c512"]
    vllm[1] |= {"verdict": "suspect", "reasons": ["prefix-cache hits on 41 % of prompt tokens"]}
    vllm[2] |= {"verdict": "invalid", "reasons": ["every request failed: <script>alert(1)</script>"], "requests": 0}
    for key, value in vllm[2].items():
        if isinstance(value, float):
            vllm[2][key] = None
    return rows


def predictions(rows: list[dict]) -> dict[str, Any]:
    def stage(name: str, engines: list[str], bias: float) -> dict[str, Any]:
        entries = []
        for row in rows:
            if row["engine"] not in engines:
                continue
            metrics = {}
            for metric, column in (
                ("ttft_s", "ttft_mean_s"), ("tpot_s", "tpot_mean_s"), ("e2e_s", "e2e_mean_s"),
                ("output_tok_per_s", "output_tok_per_s"), ("decode_tok_per_s", "decode_tok_per_s"),
                ("request_rate_per_s", "request_rate_per_s"),
            ):  # fmt: skip
                factor = 1 + bias * (0.4 + 0.1 * (row["concurrency"] or 1) ** 0.5)
                factor = 1 / factor if "per_s" in metric else factor
                value = row[column] * factor
                metrics[metric] = {"value": value, "low": value * 0.88, "high": value * 1.12}
            conditions = ("sweep", "engine", "point", "concurrency", "rate_per_s", "prompt_tokens", "output_tokens")
            entries.append(
                {k: row[k] for k in conditions}
                | {"metrics": metrics, "wall_s": 30.0, "fits": True, "note": ""}
                | {
                    "breakdown": {
                        "tpot_s": {"weights_s": 0.020, "kv_reads_s": 0.004, "compute_s": 0.003, "host_s": 0.002},
                        "ttft_s": {"own_prefill_s": 0.08, "weights_s": 0.020, "host_s": 0.002, "queue_s": 0.0},
                    }
                }
            )
        return {
            "stage": name, "time_utc": "2026-01-02T03:00:00Z", "inputs_sha256": "ab" * 32, "servebook_version": "0.1",
            "constants": {"bandwidth_gb_per_s": 505.0}, "points": entries,
        }  # fmt: skip

    engines = sorted({r["engine"] for r in rows})
    frozen = [stage("datasheet", engines, -0.35)] + [stage(f"calibrated:{e}", [e], -0.08) for e in engines]
    return {"frozen": frozen}


def requests(rows: list[dict], sweep: str = "c512") -> list[dict]:
    noise = random.Random(3)
    found = []
    for row in rows:
        if row["sweep"] != sweep or row["verdict"] == "invalid":
            continue
        for i in range(min(row["requests"], 40)):
            spread = noise.lognormvariate(0, 0.18)
            found.append({
                "sweep": sweep, "engine": row["engine"], "point": row["point"], "concurrency": row["concurrency"],
                "i": i, "phase": "measured", "ok": True, "error": None, "ttft_s": row["ttft_mean_s"] * spread,
                "tpot_s": row["tpot_mean_s"] * noise.lognormvariate(0, 0.03),
            })  # fmt: skip
    return found


def series() -> list[dict]:
    noise = random.Random(5)
    rows = []
    for t in range(120):
        flood = (t // 10) % 2 == 0
        rows.append({
            "time_s": float(t), "running": 32 - (t % 3), "waiting": 0, "kv_usage": 0.4 + 0.2 * ((t % 20) / 20),
            "prompt_tok_per_s": (10_800 if flood else 0) * noise.uniform(0.9, 1.1),
            "generation_tok_per_s": (1_000 if flood else 4_200) * noise.uniform(0.9, 1.1),
        })  # fmt: skip
    return rows


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


NASTY = "<script>alert('servebook')</script>"


def params(title: str = "Serving Qwen2.5-7B on an A40, predicted first") -> str:
    return f"""run: fixture
title: {json.dumps(title)}
description: A synthetic run for the tests.
model: {{config: qwen2.5-7b, weights: dummy}}
hardware: {{gpu: A40, price_per_hour: 0.4}}
engines: {{naive: {{kind: naive}}, vllm: {{kind: vllm}}}}
sweeps:
  c512: {{kind: concurrency, prompt_tokens: 512, output_tokens: 128, concurrency: [1, 2]}}
load: {{max_seconds: 120}}
"""


def run_folder(folder: Path, rows: list[dict], *, title: str = "Serving Qwen2.5-7B on an A40, predicted first") -> Path:
    """A run's folder as the stages leave it, without notebooks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(params(title))
    write(folder / "predictions.json", predictions([r for r in rows if r["verdict"] != "invalid"]))
    for row in rows:
        write(folder / "requests" / row["sweep"] / row["engine"] / f"{row['point']}.json", row)
    columns = list(rows[0])
    lines = [",".join(columns), *(",".join("" if r[c] is None else str(r[c]) for c in columns) for r in rows)]
    (folder / "points.csv").write_text("\n".join(lines) + "\n")
    return folder


def output(value: Any) -> dict[str, Any]:
    """A cell output as Jupyter would store it for a figure or for a helper's HTML."""
    from servebook import charts

    if hasattr(value, "servebook"):
        data = {"text/html": charts.html_figure(value), "text/plain": value.servebook.title}
        metadata: dict[str, Any] = {"servebook": {"trusted": "figure"}}
    else:
        data, metadata = value._repr_mimebundle_()
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def notebook(path: Path, cells: list[Any]) -> Path:
    """Write an executed notebook: a str is markdown, a (source, outputs) pair a code cell."""
    import nbformat

    book = nbformat.v4.new_notebook()
    for k, cell in enumerate(cells):
        if isinstance(cell, str):
            made = nbformat.v4.new_markdown_cell(cell)
        else:
            made = nbformat.v4.new_code_cell(
                cell[0], execution_count=k, outputs=[nbformat.from_dict(o) for o in cell[1]]
            )
        made["id"] = f"cell{k}"
        book.cells.append(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


def notebooks(folder: Path, rows: list[dict]) -> list[Path]:
    """The run's executed notebooks, small but with every kind of content that the real ones have."""
    from servebook import charts
    from servebook.report import tables
    from servebook.scoring import score

    frozen = predictions([r for r in rows if r["verdict"] != "invalid"])
    scores = score.score(rows, frozen)
    facts = {
        "naive": {"kind": "naive", "version": "4.57", "model": NASTY},
        "vllm": {"kind": "vllm", "version": "0.32", "kv_cache_tokens": 430_528, "flags": ["--max-model-len", "8320"]},
    }
    provenance = {
        "sessions": [
            {
                "git": {"commit": "ab" * 20, "changed": False}, "versions": {"vllm": "0.32", "torch": "2.13"},
                "command": ["servebook", "run", "params/fixture.yaml"], "gpu": {"driver": None, "power_limit_w": 300},
                "faults": [f"vllm: died: {NASTY}"],
            }
        ]
    }  # fmt: skip
    stream = {
        "output_type": "stream",
        "name": "stdout",
        "text": f"\x1b[32mready\x1b[0m\n 50%|##   | 5/10 [00:01<00:01,  4.9it/s]\n{NASTY}\n",
    }
    noise = {"output_type": "stream", "name": "stderr", "text": "Warning: only for the terminal\n"}
    foreign = {
        "output_type": "display_data", "metadata": {},
        "data": {
            "text/html": "<table><thead><tr><th></th><th>a</th></tr></thead><tbody><tr><td onclick='x()'>1</td>"
            f"<td>2</td></tr></tbody></table>{NASTY}<img src='https://example.com/a.png'>",
            "text/plain": "a",
        },
    }  # fmt: skip
    widget = {
        "output_type": "display_data", "metadata": {},
        "data": {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "HBox(children=…)"},
    }  # fmt: skip
    first = notebook(folder / "01_prediction.ipynb", [
        "# Prediction\n\nWritten before any measurement.[^1]\n\n[^1]: Frozen with a hash of its inputs.",
        "## Bytes of a decode step\n\nWith $W$ weight bytes, batch $B$, context $T$ and $k$ KV bytes per token:\n\n"
        "$$\\mathrm{bytes} = W + B\\,T\\,k, \\qquad \\mathrm{TPOT} \\ge \\frac{W + B T k}{\\mathrm{BW}}$$\n\n"
        "Code such as `cost = \"$5 and $6\"` stays code.\n\n| | bytes |\n|---|---:|\n| KV per token | 57,344 |\n"
        "| weights | 14.14e9 |\n\n<!-- hidden -->\nSee [the sweep](03_concurrency.ipynb).",
        ("facts = book.all_facts()  # what the servers said\nfor name in facts:\n    print(name)",
         [stream, noise, output(tables.facts_table(facts))]),
    ])  # fmt: skip
    throughput = charts.throughput(rows, frozen, "c512")
    third = notebook(folder / "03_concurrency.ipynb", [
        "# Concurrency sweep\n\n## Charts 1a, 2 and 3",
        ("show(charts.throughput(points, predictions, 'c512'))", [output(throughput)]),
        ("show(charts.latencies(points, predictions, 'c512'))", [output(charts.latencies(rows, frozen, "c512"))]),
        ("show(charts.latency_throughput(points, predictions, 'c512'))",
         [output(charts.latency_throughput(rows, frozen, "c512"))]),
        ("show(charts.distributions(requests, 'c512'))", [output(charts.distributions(requests(rows), "c512"))]),
        ("points_table", [output(tables.points_table(rows, "c512")), foreign, widget]),
    ])  # fmt: skip
    post = notebook(folder / "08_post.ipynb", [
        f"# Serving Qwen2.5-7B on an A40, predicted first\n\nA note from outside: {NASTY}",
        ("answer", [output(tables.answer(rows, scores, PARAMS))]),
        ("conditions", [output(tables.conditions(PARAMS, SimpleNamespace(name="A40"), provenance, facts))]),
        "## What was predicted and what came out",
        ("show(charts.throughput(points, predictions, 'c512'))", [output(throughput)]),
        ("show(charts.predicted_vs_measured(scores))", [output(charts.predicted_vs_measured(scores))]),
        ("tables.verdict_table(scores)", [output(tables.verdict_table(scores))]),
        "## What the prediction got wrong",
        ("tables.misses_prose(scores)", [output(tables.misses_prose(scores))]),
        "## Inside the server",
        ("show(charts.server_series(series))", [output(charts.server_series(series(), point="c0032"))]),
        "## Run it again",
        ("tables.limits_box(params)", [output(tables.limits_box(
            {"model": {"weights": "dummy"}, "sweeps": {"a": {"kind": "concurrency"}}, "load": {"max_seconds": 120}}))]),
        ("tables.cost_box(4032, 0.4, 'USD')", [output(tables.cost_box(4032, 0.4, "USD"))]),
        ("tables.reproducibility_box(provenance)", [output(tables.reproducibility_box(provenance))]),
    ])  # fmt: skip
    return [first, third, post]
