"""Rows of a table of published points (the form of outputs/published/public/points.csv) as servers and loads.

Lengths: "fixed"; "equal", which the source tells; "random A-B %" of a nominal value whose mean the row gives; "output
to EOS (mean M)" or "(max M)", which varies as answers do; "± P %". Where the table's sources.json says that a source
does not tell its tool, "fixed" is what nobody told, and ±10 % is taken: equal lengths keep clients in lockstep.

`cached_prompts`: how many of a run's first prompts were in the prefix cache, whole; otherwise `hit_share` of each was.

What a source tells of its runs beside its table stands in sources.json, as `told`: [{"where": {column: cell}, "cells":
{column: cell}, "why": ...}]. Rows that match get these cells before anything is predicted. A number may be a sum of
columns and numbers ("prompt_tokens + concurrency + 1500").
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from servebook.common.errors import ServebookError
from servebook.config.arrivals import schedule
from servebook.config.params import ModelParams, VllmEngine
from servebook.hardware import catalog
from servebook.hardware.catalog import Gpu
from servebook.model import reader
from servebook.model.shape import ModelShape
from servebook.predictor.server_limits import PredictedServer, server
from servebook.predictor.simulated_clients import Prompt, Traffic

LEAST_ROUNDS = 4  # of a closed loop, however many clients it has: with fewer its start is all there is
MOST_AT_ONCE = 4000
ROUNDS = 10  # of a closed loop that does not say how many prompts it sent
UNTOLD = 0.10  # spread of lengths that nobody told
EOS_SD = 0.6  # relative sd of answers that end by themselves (ShareGPT's, cut at a few hundred tokens)
METRICS = ("ttft", "tpot", "output")
CELLS = (("ttft", "ttft_ms", 1e-3), ("tpot", "tpot_ms", 1e-3), ("output", "output_tok_s", 1.0))
# what a table may call a precision: what the engine is to do with 16-bit weights (None: nothing)
QUANTIZATIONS = {
    **dict.fromkeys(("", "none", "no", "-", "auto", "bf16", "bfloat16", "fp16", "float16", "fp8kv"), None),
    **dict.fromkeys(("fp8", "fp8_e4m3", "w8a8-fp8", "fp8-dynamic"), "fp8"),
    **dict.fromkeys(("int8", "w8a8", "w8a8-int8"), "int8"),
    **dict.fromkeys(("int4", "w4a16", "awq", "awq_marlin", "gptq", "gptq_marlin"), "int4"),
}
DTYPES = {"": "bfloat16", "auto": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
SURE = 0.97  # of a floor by the datasheet's peaks, under which a figure cannot be what its row says


@dataclass
class Row:
    """A published point: its cells, and what was measured (s, s, tokens/s; only what was published)."""

    cells: Mapping[str, str]
    measured: dict[str, float] = field(default_factory=dict)

    def number(self, key: str) -> float | None:
        """Raises ServebookError for a cell that holds no finite number."""
        text = (self.cells.get(key) or "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ServebookError(f"{key} is {text!r}, no number", self.name, "Leave out what was not published")
        return value

    def whole(self, key: str, default: int | None = None) -> int | None:
        value = self.number(key)
        return default if value is None else int(value)

    @property
    def name(self) -> str:
        c = self.cells
        load = f"C={c['concurrency']}" if c.get("concurrency") else f"{c.get('num_prompts')} at once"
        if c.get("rate_per_s"):
            load = f"{c['rate_per_s']}/s"
        size = f"{c.get('prompt_tokens')}/{c.get('output_tokens')}"
        return f"{c.get('source')} {c.get('gpu')} tp{c.get('tp')} {c.get('model')} {load} {size}"

    @property
    def setup(self) -> tuple[str, ...]:
        """What stays the same over the points of one server."""
        keys = ("source", "gpu", "tp", "pp", "dp", "ep", "model", "dtype", "quant", "kv_cache_dtype", "eager", "vllm")
        return tuple(self.cells.get(k, "") for k in keys)

    @property
    def offered(self) -> float:
        """How much load: clients, prompts of a burst, or requests/s."""
        return self.number("concurrency") or self.number("rate_per_s") or self.number("num_prompts") or math.inf


def read(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The table's rows, with what sources() knows of them. Raises ServebookError where there is no table."""
    path = folder / "points.csv"
    if not path.is_file():
        raise ServebookError("there is no points.csv", str(folder), "Give the folder of a table of published points")
    rows = []
    with path.open(encoding="utf-8", newline="") as f:
        for cells in csv.DictReader(f):
            row = Row({k: v or "" for k, v in cells.items() if k})
            take_told(row, known)
            rows.append(row)
    return rows


def take_figures(row: Row) -> None:
    """The row's measured figures, from its cells. Raises ServebookError where one is no number."""
    for metric, key, scale in CELLS:
        value = row.number(key)
        if value is not None and value > 0:
            row.measured[metric] = value * scale


def sources(folder: Path, own: Path) -> dict[str, dict[str, Any]]:
    """What is known of each source, from the sources.json that is kept here and the table's own."""
    found: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys((own.resolve() / "sources.json", folder.resolve() / "sources.json")):
        if path.is_file():
            try:
                read_in = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                continue  # says nothing
            for name, source in read_in.items() if isinstance(read_in, dict) else ():
                if isinstance(source, dict):
                    found[name] = found.get(name, {}) | source
    return found


def take_told(row: Row, known: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the row the cells that its source tells beside its table."""
    cells = dict(row.cells)
    for told in known.get(cells.get("source", ""), {}).get("told", ()):
        if all(row.cells.get(k, "") == v for k, v in told.get("where", {}).items()):
            cells |= {k: _sum(str(v), row.cells) for k, v in told["cells"].items()}
    row.cells = cells


def runs_of(row: Row) -> list[tuple[Row, float]]:
    """The runs whose mean the row is, with their weights: `run_hit_shares` gives each run's share of cached prompts."""
    shares = row.cells.get("run_hit_shares", "").split()
    if not shares:
        return [(row, 1.0)]
    each = {s: Row({**row.cells, "hit_share": s}, row.measured) for s in shares}
    return [(run, shares.count(s) / len(shares)) for s, run in each.items()]


def _sum(text: str, cells: Mapping[str, str]) -> str:
    """The cell itself, or the sum of columns and numbers that it gives."""
    if "+" not in text:
        return text
    terms = [cells.get(term.strip(), term.strip()) for term in text.split("+")]
    return f"{sum(map(float, terms)):g}"


def shape_of(row: Row, folder: Path) -> ModelShape:
    c = row.cells
    kv = "fp8" if c.get("kv_cache_dtype", "").startswith("fp8") else "auto"
    dtype, quant = c.get("dtype", "").strip().lower(), c.get("quant", "").strip().lower()
    if not c.get("model"):
        raise ServebookError("the row names no model", row.name, "Give a folder of models/ or cfg: and a name")
    return _shape(c["model"], str(folder), kv, DTYPES.get(dtype, dtype), quant)


@cache
def _shape(model: str, folder: str, kv: str, dtype: str, quant: str) -> ModelShape:
    named: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv, "weights": "dummy"}
    if model.startswith("cfg:"):
        named["config"] = model[4:]
    else:
        named["path"] = str(Path(folder) / "models" / model)
    plain = reader.read_shape(ModelParams(**named), Path(folder))
    if plain.weight_bits != 16:
        return plain  # the checkpoint says it itself
    if quant not in QUANTIZATIONS:
        raise ServebookError(f"the quantization {quant!r} is not known, nor told by the checkpoint", model, "")
    asked = QUANTIZATIONS[quant]
    return reader.read_shape(ModelParams(**named, quantization=asked), Path(folder)) if asked else plain


def server_of(row: Row, folder: Path) -> PredictedServer:
    """The server that the row describes. It was served: a pool that is thought too small is taken as large enough."""
    c, shape = row.cells, shape_of(row, folder)
    gpu = gpu_of(row)
    given = {
        "max_num_batched_tokens": row.whole("max_num_batched_tokens"), "max_num_seqs": row.whole("max_num_seqs"),
        "max_model_len": row.whole("max_model_len"), "gpu_memory_utilization": row.number("gpu_memory_utilization"),
    }  # fmt: skip
    engine = VllmEngine(
        kind="vllm", tensor_parallel_size=row.whole("tp", 1), enforce_eager=_true(c.get("eager")),
        pipeline_parallel_size=row.whole("pp", 1), **_experts_of(row, shape),
        **{k: v for k, v in given.items() if v is not None},
    )  # fmt: skip
    facts = facts_of(row)
    found = server("vllm", engine, shape, gpu, facts)
    need = max(int(row.number("prompt_tokens") or 0) + int(row.number("output_tokens") or 0), 1)
    if found.problem or found.kv_tokens < 2 * need:
        longest = found.max_model_len if row.whole("max_model_len") else 0
        facts["kv_cache_tokens"] = max(found.kv_tokens, longest, 4 * need)
        found = server("vllm", engine, shape, gpu, facts)
    return found


def _true(text: str | None) -> bool:
    return (text or "").strip().lower() in ("true", "yes", "1")


def _experts_of(row: Row, shape: ModelShape) -> dict[str, Any]:
    """Replicas that share a mixture's experts step together; those of a dense model are servers by themselves."""
    if not shape.experts:
        return {}
    told = (row.cells.get("ep") or "").strip()
    whole_experts = int(told) > 1 if told.isdigit() else _true(told)
    return {"data_parallel_size": row.whole("dp", 1), "enable_expert_parallel": whole_experts}


def facts_of(row: Row) -> dict[str, Any]:
    """What the row says of its server beside its settings."""
    c, facts = row.cells, dict[str, Any](usage_per_event=False)
    pool = row.whole("kv_cache_tokens")
    if pool is None and (told := re.search(r"KV pool (\d+)", c.get("note", ""))):
        pool = int(told[1])
    if pool:
        facts["kv_cache_tokens"] = pool
    if _true(c.get("eager")):
        facts["cuda_graphs"] = False
    for name in ("sampling", "quantization"):
        if c.get(name):
            facts[name] = c[name]
    if c.get("vllm"):
        facts["version"] = c["vllm"]
    for name in ("async_scheduling", "peer_access"):
        if c.get(name):
            facts[name] = _true(c[name])
    return facts


def prompts_of(row: Row, count: int, untold: bool, seed: int = 1) -> list[Prompt]:
    """The requests, in the order sent."""
    prompt, output = row.number("prompt_tokens") or 1.0, row.number("output_tokens") or 1.0
    how, rng = row.cells.get("lengths", "").strip().lower(), random.Random(seed)
    hits, cached = row.number("hit_share") or 0.0, row.whole("cached_prompts")
    told = re.search(r"(\d+)\s*-\s*(\d+)\s*%", how)
    spread = re.search(r"±\s*(\d+)\s*%", how)

    def between(mean: float, low: float, high: float) -> int:
        nominal = mean / ((low + high) / 2)
        return max(1, round(rng.uniform(low * nominal, high * nominal)))

    most = re.search(r"max (\d+)", how)
    out = []
    for i in range(count):
        if cached is not None:
            hits = float(i < cached)
        if told:
            low, high = int(told[1]) / 100, int(told[2]) / 100
            p, o = between(prompt, low, high), between(output, low, high)
        elif spread or (untold and how in ("fixed", "")):
            s = int(spread[1]) / 100 if spread else UNTOLD
            p, o = between(prompt, 1 - s, 1 + s), between(output, 1 - s, 1 + s)
        elif "eos" in how:
            p, o = round(prompt), _answer(output, int(most[1]) if most else None, rng)
        elif how not in ("fixed", "equal", ""):
            p, o = round(rng.gammavariate(2, prompt / 2)) or 1, round(rng.gammavariate(2, output / 2)) or 1
        else:
            p, o = round(prompt), round(output)
        out.append(Prompt(p, max(o, 1), int(hits * p)))
    return out


def _answer(mean: float, most: int | None, rng: random.Random) -> int:
    """A length of an answer that ends by itself, or is cut at the most allowed. mean: of the lengths as cut. With a
    mean near the most allowed, most of them come near it."""
    if most and mean > 0.8 * most:
        return min(most, max(1, round(rng.gauss(mean, 0.5 * (most - mean) + 1))))
    sigma = math.sqrt(math.log(1 + EOS_SD**2))
    mu = _uncut(mean / most, sigma) + math.log(most) if most else math.log(mean) - sigma**2 / 2
    length = max(1, round(rng.lognormvariate(mu, sigma)))
    return min(length, most) if most else length


@cache
def _uncut(mean: float, sigma: float) -> float:
    """The mean logarithm of log-normal lengths whose mean, cut at 1, is `mean`."""
    normal = statistics.NormalDist()

    def cut(mu: float) -> float:
        return math.exp(mu + sigma**2 / 2) * normal.cdf(-mu / sigma - sigma) + normal.cdf(mu / sigma)

    low, high = -30.0, 30.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle) < mean else (low, middle)
    return low


def groups_of(row: Row) -> int:
    """Groups of requests that step by themselves: replicas, and the stages of a pipeline."""
    return max((row.whole("dp", 1) or 1) * (row.whole("pp", 1) or 1), 1)


def traffic_of(row: Row, untold: bool, seed: int = 1, most: int = 4000) -> Traffic:
    """The load as its client sends it, from the first request to the last; of several groups, one's share."""
    kind, share = row.cells.get("load"), groups_of(row)
    count = row.whole("num_prompts")
    if kind == "closed":
        c = max(round((row.number("concurrency") or 1) / share), 1)
        count = min(max((count or ROUNDS * c * share) // share, 1), max(most, LEAST_ROUNDS * c))
        return Traffic(
            prompts_of(row, count, untold, seed), concurrency=c, requests=count, seed=seed, finite=True, text=True
        )
    if kind == "burst":
        count = max((count or row.whole("concurrency") or 1) // share, 1)
        count = min(count, max(most, MOST_AT_ONCE))  # fewer at once would be another load
        prompts = prompts_of(row, count, untold, seed)
        return Traffic(prompts, arrivals_s=[0.0] * count, requests=count, seed=seed, finite=True, text=True)
    rate = row.number("rate_per_s")
    if kind != "open" or not rate:
        raise ServebookError(f"the load {kind!r} is not one of closed, open, burst", row.name, "")
    count = min(max((count or 600) // share, 1), most)
    times = list(itertools.islice(schedule("poisson", rate / share, seed), count))
    return Traffic(
        prompts_of(row, count, untold, seed), arrivals_s=times, requests=count, seed=seed, finite=True, text=True
    )


def impossible(row: Row, server: PredictedServer) -> dict[str, str]:
    """Figures that the row's own conditions rule out, by metric: under what the datasheet's peaks need. Such rows had
    their prompts in the prefix cache, or another model or card."""
    shape, gpu, ranks = server.layout.rank(server.shape), server.gpu, row.whole("dp", 1) or 1
    prompt, output = int(row.number("prompt_tokens") or 1), int(row.number("output_tokens") or 1)
    fresh = max(1, round(prompt * (1 - (row.number("hit_share") or 0.0))))
    prefill = shape.prefill_flops(fresh) / gpu.flops_per_s(shape.compute_dtype)
    weights = shape.decode_weight_bytes / gpu.bytes_per_s
    contexts = (shape.kv_read_bytes(prompt) + shape.kv_read_bytes(prompt + output)) / 2 / gpu.bytes_per_s  # a token's
    found, wrong = row.measured, {}
    at_once = max((row.whole("num_prompts") or 1) // ranks, 1) if row.cells.get("load") == "burst" else 1
    first = prefill * (min(at_once, server.config.max_num_seqs) + 1) / 2
    if found.get("ttft", math.inf) < SURE * first:
        wrong["ttft"] = f"{1e3 * found['ttft']:.0f} ms, the prompts alone need {1e3 * first:.0f} ms at peak"
    if found.get("tpot", math.inf) < SURE * weights:
        wrong["tpot"] = f"{1e3 * found['tpot']:.2f} ms, the weights alone need {1e3 * weights:.2f} ms"
    clients = row.number("concurrency")
    if clients and row.cells.get("load") == "closed":
        c = min(clients, row.number("num_prompts") or clients) / ranks
        # a round: every client's prompt is prefilled, every token's step reads the weights and all clients' contexts.
        # GEMMs may hide the reads of weights, not those of contexts: another kernel reads them
        multiply, read, attend = c * prefill, output * weights, output * c * contexts
        floor, least = multiply + read + attend, max(multiply, read) + attend
        took = clients * output / found["output"] if "output" in found else math.inf
        if took < SURE * floor:
            wrong["output"] = f"a round of {clients:g} takes {took:.2f} s, at peak {floor:.2f} s"
        round_s = found.get("ttft", math.inf) + (output - 1) * found.get("tpot", math.inf)  # Little's law
        if round_s < SURE * least and not {"ttft", "tpot"} & wrong.keys():
            both = f"a request takes {round_s:.2f} s, {clients:g} at once {least:.2f} s at peak"
            wrong.update(ttft=both, tpot=both)
    return wrong


def setups(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.setup, []).append(row)
    return found


def gpu_of(row: Row) -> Gpu:
    """The row's card, by the catalog's name or the driver's. Raises ServebookError for an unknown one."""
    name = row.cells.get("gpu", "").strip()
    gpus = catalog.catalog()
    plain = {re.sub(r"[^a-z0-9]", "", n.lower()): n for n in gpus}
    found = plain.get(re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia").removeprefix("amd")))
    if found is None:
        raise ServebookError(f"the card {name!r} is not in the catalog", row.name, "Add it to hardware/gpus.yaml")
    return gpus[found]
