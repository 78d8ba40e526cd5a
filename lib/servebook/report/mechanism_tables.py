"""Why the engines differ: each mechanism with this run's evidence and its publication; the gap as text.

One module, since every mechanism is one row of one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from ..charts import words
from ..model.shape import ModelShape
from ..scoring import analysis
from .markup import Html, columns, esc, table

# name: (what the work is, its address)
REFERENCES = {
    "Orca": (
        "Yu et al., “Orca: A Distributed Serving System for Transformer-Based Generative Models”, OSDI 2022",
        "https://www.usenix.org/conference/osdi22/presentation/yu",
    ),
    "PagedAttention": (
        "Kwon et al., “Efficient Memory Management for Large Language Model Serving with PagedAttention”, SOSP 2023",
        "https://arxiv.org/abs/2309.06180",
    ),
    "GQA": (
        "Ainslie et al., “GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints”, 2023",
        "https://arxiv.org/abs/2305.13245",
    ),
    "Sarathi-Serve": (
        "Agrawal et al., “Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve”, OSDI 2024",
        "https://arxiv.org/abs/2403.02310",
    ),
    "DistServe": (
        "Zhong et al., “DistServe: Disaggregating Prefill and Decoding for Goodput-optimized LLM Serving”, OSDI 2024",
        "https://arxiv.org/abs/2401.09670",
    ),
}
POSTS = (
    "Post 1: “Benchmarking Hugging Face Transformers vs vLLM” (Qwen2.5-7B on an A40)",
    "Post 2: its continuation with the predictions for 8,192-token prompts",
    "Write-up: “Day 4 Writeup — Serving is not decode” (Qwen3-8B on an A100)",
)


def link(name: str) -> Html:
    """A work of REFERENCES by its short name, linked."""
    title, url = REFERENCES[name]
    return Html(f'<a href="{esc(url)}" title="{esc(title)}">{esc(name)}</a>')


def references() -> Html:
    """Every work that the page refers to, with its address."""
    works = "".join(f'<li><a href="{esc(url)}">{esc(title)}</a></li>' for title, url in REFERENCES.values())
    posts = "".join(f"<li>{esc(title)}</li>" for title in POSTS)
    return Html(f'<ul class="sb-references">{works}{posts}</ul>')


def why_engines_differ(
    points: pd.DataFrame,
    shape: ModelShape,
    facts: Mapping[str, Mapping[str, Any]],
    *,
    engine: str,
    baseline: str | None,
) -> Html:
    """Each mechanism that separates a batching engine from the naive one: what it does, this run's evidence, its
    source. engine: the batching one; baseline: the other one, None if the run has none."""
    own = points[(points["kind"] == "concurrency") & (points["engine"] == engine) & (points["verdict"] != "invalid")]
    own = own[own["tpot_mean_s"] > 0].sort_values("concurrency")
    if own.empty:
        return Html("<p>Nothing of this was measured yet.</p>")
    # the largest load, with the shortest prompts where several sweeps go as far: there a step mostly decodes
    busiest = own[own["concurrency"] == own["concurrency"].max()].sort_values("prompt_tokens").iloc[0]
    longest = own[own["prompt_tokens"] == own["prompt_tokens"].max()]
    reported = facts.get(engine) or {}
    found = [
        _iteration_level(points, busiest, baseline), _selective(own, busiest), _paged(reported, own),
        _gqa(shape, busiest), _chunked(longest, reported), _overhead(points, engine, baseline),
    ]  # fmt: skip
    rows = [row for row in found if row]
    shown = columns({
        "Mechanism": [r[0] for r in rows], "What it does": [r[1] for r in rows],
        "What this run shows": [r[2] for r in rows], "Source": [r[3] for r in rows],
    })  # fmt: skip
    against = f" from {baseline}" if baseline else " from a server that takes one request at a time"
    return table(shown, f"What separates {engine}{against}", fold=False)


MechanismRow = tuple[str, str, str, Html]


def _iteration_level(points: pd.DataFrame, busiest: pd.Series[Any], baseline: str | None) -> MechanismRow:
    batch = busiest["decode_wall_tok_per_s"] * busiest["tpot_mean_s"]
    text = f"At C = {busiest['concurrency']:.0f}, {words.number(batch)} requests decode at once on average"
    serial = points[(points["engine"] == baseline) & (points["kind"] == "concurrency")]
    if len(serial):
        text += f"; {baseline} decodes one, whatever C is"
    return (
        "Iteration-level scheduling",
        "The batch is rebuilt at every step. A request joins when there is room and leaves when it is done; nobody "
        "waits for the rest of a batch.",
        f"{text}.",
        link("Orca"),
    )


def _selective(own: pd.DataFrame, busiest: pd.Series[Any]) -> MechanismRow | None:
    alone = own[(own["sweep"] == busiest["sweep"]) & (own["concurrency"] == own["concurrency"].min())]
    if alone.empty or alone["concurrency"].iloc[0] == busiest["concurrency"]:
        return None
    first = alone.iloc[0]
    longer, more = (
        busiest["tpot_mean_s"] / first["tpot_mean_s"],
        busiest["decode_tok_per_s"] / first["decode_tok_per_s"],
    )
    return (
        "Selective batching",
        "Linear layers take the tokens of all requests in one matrix product, so the weights are read once. Only "
        "attention works on each request's own cache.",
        f"From C = {first['concurrency']:.0f} to {busiest['concurrency']:.0f} ({busiest['prompt_tokens']:,.0f} in) a "
        f"token takes {words.number(longer, 2)} times as long, and {words.number(more, 2)} times as many are decoded "
        "per second.",
        link("Orca"),
    )


def _paged(facts: Mapping[str, Any], own: pd.DataFrame) -> MechanismRow | None:
    pool, block = facts.get("kv_cache_tokens"), facts.get("block_size") or 16
    if not pool:
        return None
    tokens = own["prompt_tokens"] + own["output_tokens"]
    fits, asked = pool // int(tokens.max()), int(own[tokens == tokens.max()]["concurrency"].max())
    preempted = own["preemptions"].fillna(0).sum()
    text = (
        f"The pool of {pool:,} tokens holds {fits:,} requests of {tokens.max():,.0f} tokens; at most {asked} were sent"
    )
    text += ", and none was preempted" if not preempted else f", and {preempted:,.0f} preemptions were counted"
    return (
        "Paged KV cache",
        f"The cache lies in blocks of {block} tokens that a block table puts in order. Nothing is reserved for a "
        "length that may never come, nothing is copied as a cache grows, and equal prefixes can share blocks. The "
        "naive server's cache is copied into a longer one at every token.",
        f"{text}.",
        link("PagedAttention"),
    )


def _gqa(shape: ModelShape, busiest: pd.Series[Any]) -> MechanismRow:
    context = busiest["prompt_tokens"] + busiest["output_tokens"] / 2
    batch = busiest["decode_wall_tok_per_s"] * busiest["tpot_mean_s"]
    cache = batch * shape.kv_read_bytes(context)
    share = cache / (cache + shape.decode_weight_bytes)
    groups = shape.heads / shape.kv_heads
    without = groups * cache / (groups * cache + shape.decode_weight_bytes)
    return (
        "Grouped-query attention",
        f"{shape.heads} query heads share {shape.kv_heads} key and value heads, so the cache is "
        f"{words.number(groups)} times smaller. Both engines have it: it belongs to the model.",
        f"At C = {busiest['concurrency']:.0f} the caches are {words.percent(share)} of a decode step's bytes; with "
        f"a KV head per query head they would be {words.percent(without)}.",
        link("GQA"),
    )


def _chunked(longest: pd.DataFrame, facts: Mapping[str, Any]) -> MechanismRow | None:
    budget = facts.get("max_num_batched_tokens")
    if not budget or longest.empty:
        return None
    last = longest.iloc[-1]
    chunks = -(-int(last["prompt_tokens"]) // int(budget))
    text = f"A prompt of {last['prompt_tokens']:,.0f} tokens takes {chunks} {'step' if chunks == 1 else 'steps'}"
    if pd.notna(last["itl_p99_s"]):
        text += (
            f"; at C = {last['concurrency']:.0f} the median gap between tokens is {words.seconds(last['itl_p50_s'])}, "
            f"p99 {words.seconds(last['itl_p99_s'])}: a token that shares its step with a chunk waits for it"
        )
    return (
        "Chunked prefill",
        f"A step has a budget of {budget:,} tokens. A longer prompt is computed in chunks next to the decodes, so it "
        "never stops them for longer than one chunk.",
        f"{text}.",
        link("Sarathi-Serve"),
    )


def _overhead(points: pd.DataFrame, engine: str, baseline: str | None) -> MechanismRow | None:
    alone = points[(points["kind"] == "concurrency") & (points["concurrency"] == 1) & (points["tpot_mean_s"] > 0)]
    one, two = (alone[alone["engine"] == e] for e in (baseline, engine))
    if one.empty or two.empty:
        return None
    shared = [s for s in one["sweep"] if s in set(two["sweep"])]
    if not shared:
        return None
    slow, fast = (f[f["sweep"] == shared[0]]["tpot_mean_s"].iloc[0] for f in (one, two))
    return (
        "Less host work a step",
        "Fused kernels, and CUDA graphs where they are on, launch a step in few calls. The naive server's Python "
        "launches every kernel of every layer by itself, and the faster the device, the longer it waits for that.",
        f"At C = 1, with no batching anywhere, a token takes {words.seconds(slow)} on {baseline} and "
        f"{words.seconds(fast)} on {engine}: {words.factor(slow / fast)}.",
        Html("post 1, point 6"),
    )


def gap_in_words(
    points: pd.DataFrame, predicted: Iterable[Mapping[str, Any]], *, engine: str, baseline: str | None
) -> Html:
    """Where the gap comes from, at C = 1 and at the largest C that both engines measured: factors, then sentences.

    predicted: the baseline's frozen points: what of its TPOT is the host's."""
    if baseline is None:
        return Html("<p>This run has no engine without batching, so there is no gap to explain.</p>")
    frame = analysis.engine_gap(points[points["verdict"] != "invalid"], baseline, engine)
    frame = frame.dropna(subset=["output_ratio"])
    if frame.empty:
        return Html("<p>No load was measured on both engines.</p>")
    rows, hosts = [], {(p["sweep"], p["point"]): _host_share(p) for p in predicted}
    for _, own in frame.groupby("sweep", sort=False):
        own = own.sort_values("concurrency")
        rows += [own.iloc[0], *([own.iloc[-1]] if len(own) > 1 else [])]
    shown = columns({
        "Load": [f"{r['sweep']}, C = {r['concurrency']:.0f}" for r in rows],
        f"{engine} over {baseline}, output tok/s": [words.factor(r["output_ratio"]) for r in rows],
        "shorter step": [words.factor(r["step_ratio"]) for r in rows],
        "more requests in the batch": [words.factor(r["batch_ratio"]) for r in rows],
        "more of the time decoding": [words.factor(r["rest_ratio"]) for r in rows],
    })  # fmt: skip
    caption = "The ratio of output rates, and the three factors that multiply to it"
    made = table(shown, caption, right=tuple(shown.columns[1:]), fold=False)
    return Html(f"{made}<p>{esc(_gap_sentences(rows, hosts, engine, baseline))}</p>")


def _host_share(point: Mapping[str, Any]) -> float | None:
    parts = (point.get("breakdown") or {}).get("tpot_s") or {}
    total = sum(parts.values())
    return (parts.get("host_s", 0.0) + parts.get("launch_s", 0.0)) / total if total else None


def _gap_sentences(
    rows: list[pd.Series[Any]], hosts: Mapping[tuple[str, str], float | None], engine: str, baseline: str
) -> str:
    """Which factor makes the gap at C = 1, and which at the largest C."""
    alone = [r for r in rows if r["concurrency"] == 1]
    crowded = [r for r in rows if r["concurrency"] > 1]
    parts = []
    if alone:
        row = alone[0]
        text = (
            f"At C = 1 ({row['sweep']}) nothing is batched: the factor of {words.factor(row['output_ratio'])} is "
            f"{words.factor(row['step_ratio'])} from the time of a step, times {words.factor(row['rest_ratio'])} from "
            "the share of its time that a request decodes rather than prefills"
        )
        host = hosts.get((row["sweep"], "c0001"))
        if host is not None and host > 0.2:
            text += (
                f". By the prediction, {words.percent(host)} of {baseline}'s time per token goes to the host, which "
                "launches one kernel after the other"
            )
        parts.append(f"{text}.")
    if crowded:
        row = max(crowded, key=lambda r: r["output_ratio"])
        at, batch, step = f"At C = {row['concurrency']:.0f} ({row['sweep']})", row["batch_ratio"], row["step_ratio"]
        if batch > step:
            parts.append(
                f"{at} batching makes most of it: {engine} reads the weights once for all requests of a step, and has "
                f"{words.factor(batch)} as many in its batch as {baseline}."
            )
        else:
            parts.append(f"{at} the step still makes most of it: {baseline}'s takes {words.factor(step)} as long.")
    return " ".join(parts)
