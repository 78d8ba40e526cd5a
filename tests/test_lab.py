"""Explore says what the book says; its panel redraws; a run by hand is followed from its files."""

from __future__ import annotations

import csv
import inspect
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from IPython.display import DisplayHandle
from servebook.charts import waterfall_svg
from servebook.common.errors import ServebookError
from servebook.common.measured_point import MeasuredPoint
from servebook.config import params
from servebook.config.points import PointSpec
from servebook.hardware.catalog import Gpu
from servebook.lab import asking, comparable, explore, forecasters, params_file, runs
from servebook.predictor import predict
from servebook.run import live, live_state, live_view
from servebook.run_folder import results

ROOT = Path(__file__).parents[1]
H200 = "h200-qwen2.5-7b (reference)"


# --- the functions -------------------------------------------------------------------------------------------------


def test_explore_says_what_the_book_predicts() -> None:
    run = runs.read_run(H200)
    f = predict.forecaster(
        run.params, "vllm", run.shape, run.gpu, facts=run.facts["vllm"], measured=run.alone("vllm"),
        samples=forecasters.SAMPLES,
    )  # fmt: skip
    own = f.point(PointSpec("short_prompts", "vllm", "c0016", "concurrency", 512, 128, concurrency=16))
    said = explore.predict(run=H200, prompt_tokens=512, output_tokens=128, concurrency=16)
    for metric, value in own["metrics"].items():
        assert said.value(metric) == pytest.approx(value["value"])
    low, high = said.interval("tpot_s")
    assert low < said.tpot_s < high


def test_a_glance_is_near_the_prediction() -> None:
    s = explore.Setting(gpu="A100-80GB-SXM", prompt_tokens=1024, output_tokens=256, concurrency=32)
    quick_predict, whole = explore.quick_predict(s), explore.predict(s)
    for metric in ("ttft_s", "tpot_s", "output_tok_per_s"):  # one course of clients beside the middle of many
        low, high = whole.interval(metric)
        assert 0.95 * low < quick_predict.value(metric) < 1.05 * high
    assert quick_predict.interval("tpot_s") is None and "Quick estimate" in quick_predict.how


def test_published_points_lie_on_the_curve() -> None:
    curve = explore.against("a40-qwen2.5-7b (published)", "long_prompts")
    said = {p["point"]: p["metrics"]["tpot_s"]["value"] for p in curve.predicted}
    measured = {p.point_id: p.tpot_mean_s for p in curve.measured}
    assert len(measured) >= 5 and all(said[p] == pytest.approx(v, rel=0.1) for p, v in measured.items())
    assert len(curve.figures) == 2 and "Mean error" in curve.text()


def test_a_what_if_keeps_what_was_learned_on_the_same_gpu_only() -> None:
    base = explore.Setting(run=H200)
    fp8, other = base.but(quantization="fp8"), base.but(gpu="A40")
    assert forecasters.of(fp8).calibration is forecasters.of(base).calibration
    assert forecasters.of(other).calibration.stage == "datasheet"
    table = explore.what_if(base, gpus=["A40", "T4"]).forecasts
    assert table["fp8 weights"].tpot_s < table["as it is"].tpot_s < table["A40"].tpot_s
    assert table["T4"].setting.shape.dtype == "float16"  # it has no bfloat16


def test_a_limit_that_is_given_replaces_the_runs() -> None:
    base = explore.Setting(run=H200)
    of_run, given = forecasters.of(base).server, forecasters.of(base.but(max_num_batched_tokens=4096)).server
    assert (of_run.config.max_num_batched_tokens, given.config.max_num_batched_tokens) == (2048, 4096)
    assert given.kv_tokens == of_run.kv_tokens  # what the engine had said of itself still holds
    assert forecasters.of(base.but(kv_cache_dtype="fp8")).server.kv_tokens > 1.8 * of_run.kv_tokens


def test_an_engine_of_the_run_and_a_card_of_ones_own() -> None:
    by_name, by_kind = explore.quick_predict(run=H200, engine="hf"), explore.quick_predict(run=H200, engine="naive")
    assert by_name.tpot_s == pytest.approx(by_kind.tpot_s) and by_name.setting.naive and by_kind.setting.naive
    assert explore.against(H200, "short_prompts", "hf").predicted[0]["engine"] == "hf"
    own = Gpu(name="Dream", fp16_tflops=1000, bf16_tflops=1000, memory_bandwidth_gb_per_s=10_000, memory_gib=200)
    assert explore.quick_predict(gpu=own).tpot_s < explore.quick_predict().tpot_s


def test_goodput_cost_and_kv_follow_their_definitions() -> None:
    f = explore.predict(price_per_hour=3.6, tensor_parallel_size=2, concurrency=8, ttft_slo_s=1e-6)
    assert f.goodput_per_s == 0.0 and f.met_share == 0.0
    assert f.cost_per_million_tokens == pytest.approx(2 * 3.6 / 3600 / f.output_tok_per_s * 1e6)
    assert f.kv_share == pytest.approx(f.point["running_mean"] * (512 + 64) / f.kv_tokens)
    pair = explore.predict(data_parallel_size=2, concurrency=8)
    assert pair.kv_tokens == 2 * explore.predict(concurrency=8).kv_tokens and pair.setting.gpus == 2
    easy = explore.predict(concurrency=8)
    assert easy.goodput_per_s == easy.request_rate_per_s and easy.cost_per_million_tokens is None


def test_what_cannot_be_served_says_why() -> None:
    assert "exceed the context" in explore.predict(prompt_tokens=40_000).note
    for make in (explore.predict, explore.quick_predict):
        over = make(gpu="A40", max_model_len=8192, rate_per_s=500.0)
        assert not over.fits and "overloaded" in over.note and "overloaded" in over.html()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"promt_tokens": 5}, "Did you mean prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"concurrency": 2.5}, "concurrency is 2.5"),
        ({"rate_per_s": -1.0}, "rate_per_s is -1.0"),
        ({"gpu": "H20O"}, "unknown GPU"),
        ({"quantization": "fp9"}, "quantization is 'fp9'"),
        ({"engine": "sglang"}, "no engine 'sglang'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"run": "nowhere"}, "no run 'nowhere'"),
        ({"price_per_hour": -1.0}, "price_per_hour is -1.0"),
        ({"price_per_hour": "3"}, "price_per_hour is '3'"),
        ({"ttft_slo_s": float("nan")}, "ttft_slo_s is nan"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4'"),
        ({"model": ""}, "model is ''"),
        ({"gpu": None}, "gpu is None"),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict, says: str) -> None:
    with pytest.raises(ServebookError, match=re.escape(says)) as caught:
        explore.predict(**settings)
    assert "\n" not in caught.value.line()


def test_a_sweep_that_is_not_there_is_one_line() -> None:
    with pytest.raises(ServebookError, match="There are: short_prompts"):
        explore.against(H200, "short_promts")


def test_the_waterfall_adds_up_and_is_sound_svg() -> None:
    f = explore.predict(concurrency=4)
    for metric, value in (("TPOT", f.tpot_s), ("TTFT", f.ttft_s)):
        parts = f.waterfalls()[metric]
        assert sum(v for _, v in parts) == pytest.approx(value, rel=1e-3)  # but for what is too small to see
        drawn = ET.fromstring(
            waterfall_svg.waterfall([(f"{label} & <more>", v) for label, v in parts], what=metric, total=value)
        )
        assert len(drawn.findall(".//rect")) == len(parts) + 1


def test_the_first_argument_is_the_model_and_print_shows_figures(capsys: pytest.CaptureFixture[str]) -> None:
    said = explore.predict("qwen2.5-7b", concurrency=4)
    assert said.setting.model == "qwen2.5-7b"
    print(said, [said])
    assert capsys.readouterr().out.count("TTFT") == 2
    with pytest.raises(ServebookError, match="the first argument is 3"):
        explore.predict(3)


def test_cases_and_gpus_are_checked() -> None:
    with pytest.raises(ServebookError, match="the case 'fp8' is 'fp8'"):
        explore.compare(fp8="fp8")
    assert list(explore.what_if(gpus="A40").forecasts)[-1] == "A40"
    with pytest.raises(ServebookError, match="no GPU 'A4O'"):
        explore.what_if(gpus=["A4O"])


def test_signatures_name_every_setting_and_tab_shows_no_insides() -> None:
    for function in (
        explore.predict,
        explore.quick_predict,
        explore.what_if,
        explore.curve,
        explore.against,
        explore.panel,
    ):
        shown = inspect.signature(function).parameters
        assert {"gpu", "prompt_tokens", "price_per_hour", "kv_cache_dtype"} <= set(shown), function
        assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    public = {n for n in vars(explore) if not n.startswith("_")}
    assert public == set(explore.__all__)


def test_another_gpu_or_model_is_not_comparable_and_has_no_price() -> None:
    priced = explore.predict(run=H200, concurrency=16, price_per_hour=3.5)
    assert explore.compare(priced.setting, other={"gpu": "A40"}).forecasts["other"].cost_per_million_tokens is None
    other = explore.predict(run=H200, gpu="L40S", concurrency=16)
    assert "constants learned" not in other.html() and "not comparable with" in other.html()
    for changes in ({"gpu": "L40S"}, {"model": "qwen3-8b", "output_tokens": 300}):
        curve = explore.against(H200, "short_prompts", **changes)
        assert curve.measured == [] and "Not comparable" in curve.text() and "Mean error" not in curve.text()
        assert curve.note in curve.html()


def test_a_what_if_is_scored_by_the_run_that_measured_it() -> None:
    curve = explore.against(H200, "short_prompts", quantization="fp8")
    assert curve.run == "h200-qwen2.5-7b-fp8 (reference)" and "Mean error" in curve.text()
    unmeasured = explore.against(H200, "short_prompts", kv_cache_dtype="fp8")
    assert "fp8 KV cache, measured with 16-bit" in unmeasured.text() and "Mean error" not in unmeasured.text()
    table = explore.what_if(run=H200, concurrency=16, prompt_tokens=512, output_tokens=128)
    name, point = table.measured["fp8 weights"]
    assert name == "h200-qwen2.5-7b-fp8 (reference)" and point.concurrency == 16
    low, high = table.forecasts["fp8 weights"].interval("output_tok_per_s")
    assert low < point.output_tok_per_s < high  # what was learned from bf16 does not know fp8's gain better


def test_one_simulation_answers_tiles_cases_and_curves() -> None:
    s = explore.Setting(run=H200, prompt_tokens=512, output_tokens=128, concurrency=16)
    tile = explore.predict(s)
    row = explore.what_if(s).forecasts["as it is"]
    [on_curve] = [p for p in explore.against(H200, "short_prompts", setting=s).predicted if p["concurrency"] == 16]
    for metric, value in tile.point["metrics"].items():
        assert row.point["metrics"][metric] == value == on_curve["metrics"][metric]


@pytest.mark.parametrize("load", [(1, 64, 128), (8, 2048, 1), (64, 512, 128), (256, 2048, 128), (64, 16384, 1024)])
@pytest.mark.parametrize("run", [None, H200])
def test_parts_are_time_spent(run: str | None, load: tuple[int, int, int]) -> None:
    c, prompt, output = load
    given = {"run": run} if run else {}
    f = explore.quick_predict(**given, concurrency=c, prompt_tokens=prompt, output_tokens=output)
    for metric, parts in f.waterfalls().items():
        total = f.value(f"{metric.lower()}_s")
        assert all(v > 1e-8 for _, v in parts) and sum(v for _, v in parts) == pytest.approx(total, rel=2e-3)


def test_code_gives_the_setting_again() -> None:
    for s in (explore.Setting(gpu="A40", quantization="fp8"), explore.predict(run=H200, concurrency=3).setting):
        assert eval(asking.code(s), {"explore": explore}).setting == s


def test_what_is_exported_can_be_read_again(tmp_path: Path) -> None:
    curve = explore.against(H200, "short_prompts")
    with curve.to_csv(tmp_path / "c.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["metric"] == "tpot_s"]
    assert len(rows) == len(curve.measured) and all(r["measured"] and r["predicted"] for r in rows)
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in curve.to_png(tmp_path / "c.png"))
    for s in (curve.setting, explore.Setting(gpu="A40", rate_per_s=2.0, ttft_slo_s=0.5, tensor_parallel_size=2)):
        made = params.read_file(params_file.write(s, tmp_path / "p.yaml"))
        assert (made.hardware.gpu, made.model.config) == (s.gpu, s.model) and made.slo == s.slo


def test_runs_that_measured_a_setting_are_found_by_what_they_served() -> None:
    own = explore.predict(run=H200, concurrency=16).setting
    assert [run.name for run, _ in comparable.measuring(own)] == [H200]
    assert comparable.measuring(own.but(kv_cache_dtype="fp8")) == []


# --- the panel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the panel's outputs are given, as they are given it."""
    pages: list[str] = []
    monkeypatch.setattr(DisplayHandle, "update", lambda self, bundle, raw: pages.append(bundle["text/html"]))
    monkeypatch.setattr(DisplayHandle, "display", lambda self, bundle, raw: None)
    return pages


def test_a_turned_control_redraws(shown: list[str]) -> None:
    panel = explore.panel(concurrency=16)
    panel._ipython_display_()
    assert len(shown) == 3 and shown[0].count("<svg") == 2  # the load's figures, the cases, the curves
    shown.clear()
    panel._controls["concurrency"].value = 64
    assert panel.setting.concurrency == 64
    assert "C\u00a0=\u00a064" in shown[0] and len(panel.redraws_s) == 1
    panel._controls["prompt_tokens"].value = 65536
    assert any("exceed the context" in page for page in shown)


def test_a_loaded_run_brings_its_setting_and_points(shown: list[str]) -> None:
    panel = explore.panel()
    panel._ipython_display_()
    shown.clear()
    panel.run.value = "a100-qwen3-8b (published)"
    assert panel.setting.model == "Qwen/Qwen3-8B" or panel.setting.model == "qwen3-8b"
    assert (panel.setting.prompt_tokens, panel.setting.output_tokens) == (1000, 1000)
    assert "Mean error of the prediction" in shown[-1]
    panel.run.value = "none"
    assert panel.setting.run is None and "Predicted only" in shown[-1]


def test_another_gpu_takes_the_runs_price_and_points_away(shown: list[str]) -> None:
    panel = explore.panel(run=H200, price_per_hour=3.5)
    panel._ipython_display_()
    panel._controls["gpu"].value = "L40S"
    assert panel.setting.price_per_hour == 0.0
    assert "not comparable with" in shown[-3] and "Not comparable" in shown[-1] and "Mean error" not in shown[-1]
    panel._controls["model"].value = "/no/such/folder"
    assert any('class="bad"' in page for page in shown[-4:])


def test_buttons_reset_show_code_and_export(shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    panel = explore.panel(run=H200)
    panel._ipython_display_()
    start = panel.setting
    panel._controls["concurrency"].value = 8
    panel.actions["Code"].click()
    assert "concurrency=8" in panel.message.value and "user-select:all" in panel.message.value
    for name in ("CSV", "PNG", "Parameter file"):
        panel.actions[name].click()
        assert "written" in panel.message.value, panel.message.value
    assert {p.suffix for p in tmp_path.iterdir()} == {".csv", ".png", ".yaml"}
    panel.actions["Reset"].click()
    assert panel.setting == start


def test_what_was_drawn_for_another_setting_is_faint(shown: list[str]) -> None:
    panel = explore.panel()
    panel._ipython_display_()
    old = re.search(r'class="(sb-of-\d+) (n\d+)"', shown[-1])
    panel._draw("now", lambda: explore.quick_predict(panel.setting))
    assert f".{old[1]}:not(.{old[2]})" in shown[-1]
    panel._count += 1
    panel._draw("now", lambda: explore.quick_predict(panel.setting))
    assert f".{old[1]}:not(.{old[2]})" not in shown[-1]


def test_without_a_kernel_words_stand_for_the_controls(capsys: pytest.CaptureFixture[str], shown: list[str]) -> None:
    explore.panel()._ipython_display_()
    assert "need a running kernel" in capsys.readouterr().out


# --- a run by hand -------------------------------------------------------------------------------------------------


class Book:
    """As much of a book as the follower asks for."""

    listener = None

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        self.points = [PointSpec("s", "vllm", f"c{c:04d}", "concurrency", 64, 16, concurrency=c) for c in (1, 2, 4)]

    def specs(self, engine: str, sweep: str) -> list[PointSpec]:
        return self.points

    def frozen_points(self, engine: str) -> list[dict]:
        metrics = {m: {"value": 0.02, "low": 0.01, "high": 0.03} for m in ("ttft_s", "tpot_s")}
        return [{"sweep": "s", "point": p.point, "wall_s": 30.0, "metrics": metrics} for p in self.points]


def write_rows(book: Book, point: str, *phases: str) -> None:
    path = results.rows_path(book.dir, "s", "vllm", point)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        for i, phase in enumerate(phases):
            out.write(json.dumps({"phase": phase, "ok": True, "ttft_s": 0.1 * (i + 1), "tpot_s": 0.01}) + "\n")


def stored_point(**figures) -> MeasuredPoint:
    return MeasuredPoint(sweep="s", engine="vllm", point_id="c0001", prompt_tokens=8, output_tokens=4, **figures)


def test_a_run_is_followed_from_its_files(tmp_path: Path) -> None:
    book = Book(tmp_path)
    follower = live_state.Follower(book, book.points)
    state = follower.look()
    assert state.now is None and state.left_s == pytest.approx(90, abs=1)
    assert "starting vllm" in live_view.progress(follower, state, [])
    follower.line("vllm: ended by a signal; starting it again")
    assert follower.look().now is None
    follower.point_progress("warm-up 1/2, 0 s of at most 8 s")
    write_rows(book, "c0001", "warmup", "warmup")
    state = follower.look()
    assert state.now.point == "c0001" and state.warm and state.rows == 2
    write_rows(book, "c0001", "measured", "measured", "measured")
    state = follower.look()
    assert not state.warm and state.rows == 3 and state.means["ttft_s"] == pytest.approx(0.2)
    drawn = live_view.progress(follower, state, ["a line <said>"])
    assert "so far: TTFT 200\u00a0ms (predicted 20\u00a0ms)" in drawn and "&lt;said&gt;" in drawn
    for figure in re.findall(r"<figure>.*?</figure>", drawn):
        assert len(ET.fromstring(figure).findall(".//circle")) == 1
    assert follower.interrupted().endswith(
        "interrupted with 0 of 3 points done; the 5 requests of c0001 are in its rows"
    )
    results.write_point(tmp_path, stored_point(ttft_mean_s=0.2, tpot_mean_s=0.01))
    state = follower.look()
    assert [s.point for s, _ in state.done] == ["c0001"] and state.now.point == "c0002" and state.rows == 0
    assert state.left_s == pytest.approx(60, abs=1)


def test_a_point_that_is_measured_again_is_done_when_it_is_new(tmp_path: Path) -> None:
    book = Book(tmp_path)
    results.write_point(tmp_path, stored_point(ttft_mean_s=0.5, started_at="then"))
    follower = live_state.Follower(book, book.points)
    assert follower.look().done == []
    results.write_point(tmp_path, stored_point(ttft_mean_s=0.2, started_at="now"))
    assert follower.look().done == [(book.points[0], {"ttft_s": 0.2, "tpot_s": None})]


def test_a_torn_row_waits_for_its_end(tmp_path: Path) -> None:
    book = Book(tmp_path)
    follower = live_state.Follower(book, book.points)
    follower.point_progress("measured 0/2")
    write_rows(book, "c0001", "measured")
    path = results.rows_path(tmp_path, "s", "vllm", "c0001")
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert follower.look().rows == 1
    path.write_text(whole + whole)
    assert follower.look().rows == 2


def test_nobody_watches_without_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(tmp_path)
    for session in (None, "a notebook, but no kernel here"):
        if session:
            monkeypatch.setenv("JPY_SESSION_NAME", session)
        else:
            monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
        with live.watching(book, book.points):
            assert book.listener is None


# --- the notebook and the start page -------------------------------------------------------------------------------


def test_explore_runs_without_a_front_end(tmp_path: Path) -> None:
    """Executed and exported as a page: the figures stand, the controls are words, no widget state is kept."""
    import nbclient
    import nbconvert
    import nbformat

    book = nbformat.read(ROOT / "notebooks/explore.ipynb", as_version=4)
    fault = nbformat.v4.new_code_cell("explore.predict(promt_tokens=5)", metadata={"tags": ["raises-exception"]})
    book.cells.append(fault)
    client = nbclient.NotebookClient(
        book, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "notebooks")}},
        extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
    )  # fmt: skip
    with client.setup_kernel():
        for i, cell in enumerate(book.cells):
            client.execute_cell(cell, i)
    assert "widgets" not in book.metadata
    [error] = book.cells.pop().outputs  # a user's fault is one line in a cell too
    assert error.traceback == ["ServebookError: explore: no setting 'promt_tokens'. " + error.evalue.partition(". ")[2]]
    page, _ = nbconvert.HTMLExporter(template_name="basic").from_notebook_node(book)
    assert page.count("<svg") >= 8 and "need a running kernel" in page and "What would change it" in page


def test_the_start_page_leads_to_every_notebook_and_explore_first() -> None:
    text = (ROOT / "notebooks/README.md").read_text()
    linked = re.findall(r"\]\(([\w.]+\.ipynb)\)", text)
    assert linked[0] == "explore.ipynb" and sorted(linked) == sorted(
        p.name for p in (ROOT / "notebooks").glob("*.ipynb")
    )


def test_lab_listens_to_this_machine_alone_with_a_token_and_asks_nobody_for_news() -> None:
    import jupyter_lab

    line = jupyter_lab.made_command(ROOT)
    assert "--ip=127.0.0.1" in line and "token" not in line  # Jupyter's own: a random one
    settings = re.search(r"app_settings_dir='?([^' ]+)", line)[1]
    said = json.loads((Path(settings) / "overrides.json").read_text())
    assert said["@jupyterlab/apputils-extension:notification"] == {"checkForUpdates": False, "fetchNews": "false"}
