"""The prefix-cache experiment: its points, what a caching server makes of them, its table and its figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mock_server import Behaviour, serving
from servebook import charts
from servebook.common.reasons import ReasonCode
from servebook.config import params, points
from servebook.config.params import Load, Slo
from servebook.load import measure_point_sync
from servebook.load.window import Rule
from servebook.report import tables
from servebook.report.markup import place
from servebook.run_folder import results
from servebook.scoring import analysis

RUN = """
run: cache
title: t
model: {config: tiny-qwen2, weights: dummy}
hardware: {gpu: A40}
engines:
  hf: {kind: naive}
  vllm: {kind: vllm}
  bare: {kind: vllm, prefix_caching: false}
sweeps:
  warm: {kind: prefix_cache, prompt_tokens: 32, output_tokens: 8, concurrency: [1, 2]}
"""


def specs(engine: str) -> list[points.PointSpec]:
    return params.read_text(RUN).sweep_points("warm", engine)


def test_repeated_points_only_where_something_is_cached() -> None:
    assert [s.point for s in specs("vllm")] == ["fresh-c0001", "fresh-c0002", "same-c0001", "same-c0002"]
    assert [s.point for s in specs("bare")] == [s.point for s in specs("hf")] == ["fresh-c0001", "fresh-c0002"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep on a server that answers faster what it has seen before."""
    folder = tmp_path_factory.mktemp("run")
    with serving(Behaviour(ttft_s=0.03, itl_s=0.001)) as server:
        seen: set[tuple[int, ...]] = set()

        def look(request: dict[str, Any]) -> None:
            prompt = tuple(request["prompt"])
            server.b.ttft_s, server.b.cached_share = (0.005, 0.5) if prompt in seen else (0.03, 0.0)
            seen.add(prompt)

        server.on_request = look
        for spec in specs("vllm"):
            point = measure_point_sync(
                spec, url=server.url, model="mock", vocab=range(100, 1000), load=Load(jitter_s=0.001), slo=Slo(),
                run_dir=folder, batching=True, rule=Rule(0, 8, 8, 0, 20),
            )  # fmt: skip
            results.write_point(folder, point)
    return folder


def test_repeated_prompts_are_repeated_flatter_and_count_as_no_figure_of_the_engine(run_dir: Path) -> None:
    found = {p.point_id: p for p in results.read_points(run_dir)}
    assert all(found[f"fresh-c000{c}"].verdict != "invalid" for c in (1, 2))
    assert found["same-c0002"].verdict == "invalid"
    assert found["same-c0002"].reasons[0].code is ReasonCode.REPEATED_PROMPTS
    assert found["same-c0002"].requests == 8 and found["same-c0002"].failures == 0
    table = analysis.prefix_cache(results.points_frame(run_dir), "warm")
    assert list(table["concurrency"]) == [1, 2]
    for row in table.itertuples():
        fresh, same = found[f"fresh-c000{row.concurrency}"], found[f"same-c000{row.concurrency}"]
        assert row.ttft_ratio == pytest.approx(same.ttft_mean_s / fresh.ttft_mean_s)
        assert row.output_ratio == pytest.approx(same.output_tok_per_s / fresh.output_tok_per_s)


def test_the_table_and_the_figure_say_how_much(run_dir: Path) -> None:
    frame = results.points_frame(run_dir)
    shown = tables.prefix_cache(frame, "warm")
    assert "TTFT same seed" in shown and "×" in shown
    assert "No point" in tables.prefix_cache(frame[:0], "warm")
    text = charts.text_of(charts.prefix_cache(frame, "warm"))
    assert text.takeaway.startswith("With one seed for every C, ") and "vllm, same" in text.alt


def test_a_table_of_points_tells_repeated_prompts_from_fresh_ones(run_dir: Path) -> None:
    loads = [place(row) for row in results.points_frame(run_dir).itertuples() if row.engine == "vllm"]
    assert sorted(loads) == ["C = 1", "C = 1, prompts sent before", "C = 2", "C = 2, prompts sent before"]


def test_an_engine_that_caches_nothing_has_a_row_without_ratios(run_dir: Path) -> None:
    frame = results.points_frame(run_dir)
    off = frame[frame["point"].str.startswith("fresh")].assign(engine="bare")
    table = analysis.prefix_cache(off, "warm")
    assert len(table) == 2 and table["ttft_ratio"].isna().all()
    assert "–" in tables.prefix_cache(off, "warm")
    assert charts.text_of(charts.prefix_cache(off, "warm")).takeaway
