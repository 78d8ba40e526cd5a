"""The figures that explain the mechanism say and draw what their data hold."""

from pathlib import Path

import linear_weights
import pytest
from servebook import charts, model
from servebook.charts import mechanism
from servebook.config.params import ModelParams
from servebook.predictor.scheduler import Request, Scheduler, SchedulerConfig


@pytest.fixture(scope="module")
def shape():
    return model.read_shape(ModelParams(config="qwen2.5-7b", weights="dummy"), Path("."))


def steps_of(prompts: int, prompt_tokens: int, budget: int, count: int) -> list[dict[str, int]]:
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=budget, async_scheduling=False), trace=True)
    for i in range(prompts):
        scheduler.add(Request(i, prompt_tokens, 128))
    steps = []
    for _ in range(count):
        step = scheduler.schedule()
        steps.append({"ABC"[i]: n for i, n in (step.tokens or {}).items()})
        scheduler.update(step)
    return steps


def test_a_layers_parts_sum_to_the_shapes_own_count(shape) -> None:
    parts = mechanism.layer_parts(shape, 8192)
    weights = sum(size for name, _, size in parts if name != "KV cache")
    assert shape.layers * weights == linear_weights.stored_bytes(shape)
    assert {name: size for name, _, size in parts}["KV cache"] * shape.layers == 8192 * shape.kv_bytes_per_token
    text = charts.decoder_layer(shape, 8192).servebook
    assert "MLP is 84 %" in text.takeaway and "gate (3,584 × 18,944): 136 MB" in text.alt


def test_two_prompts_take_turns_as_post_2_describes(shape) -> None:
    steps = steps_of(2, 8192, 2048, 5)
    assert steps == [*[{"A": 2048}] * 4, {"A": 1, "B": 2047}]
    figure = charts.scheduler_steps(steps, 2048)
    assert "step 5: A 1, B 2,047" in figure.servebook.alt
    assert "In 5 of 5 steps a single prompt" in figure.servebook.takeaway
    rest = charts.scheduler_steps([{"A": 4}, {"A": 1, "B": 3}, {"A": 1, "B": 2}], 4)
    assert "In 2 of 3 steps" in rest.servebook.takeaway, "the last step leaves budget over"
    widths = [p.get_width() for p in figure.axes[0].patches]
    assert max(widths) <= 2048 and min(widths) >= 0.02 * 2048  # a decode is seen, no step is longer than its budget


def test_a_packed_step_tells_new_tokens_and_context() -> None:
    text = charts.packed_step({"A": 1, "B": 2047}, {"A": 8193, "B": 2047}).servebook
    assert "1 decode token rides with a chunk of 2,047" in text.takeaway
    assert "A: 1 new, 8,193 of context" in text.alt


def test_block_tables_name_every_block_and_whose_blocks_are_scattered() -> None:
    figure = charts.block_tables({"A": [0, 1, 4], "B": [2, 3]}, 8, 16)
    text = figure.servebook
    assert "5 of 8 blocks" in text.takeaway and "blocks of A do not lie" in text.takeaway
    assert "A: 0, 1, 4; B: 2, 3" in text.alt
    assert {t.get_text() for t in figure.axes[0].texts} >= {"A0", "A1", "A2", "B0", "B1", "5", "6", "7"}


def test_every_one_of_them_becomes_html_for_page_and_phone(shape) -> None:
    for figure in (
        charts.decoder_layer(shape, 512), charts.scheduler_steps(steps_of(3, 1024, 512, 10), 512),
        charts.packed_step({"A": 1, "B": 511}, {"A": 1030, "B": 511}), charts.block_tables({"A": [0]}, 4, 16),
    ):  # fmt: skip
        assert charts.html_figure(figure).count("<svg") == 2 and "nan" not in figure.servebook.alt
