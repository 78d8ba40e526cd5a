"""The widgets of an exploration: every setting at hand, redrawn as it is turned.

The figures of the load come first, within the same callback; the comparison and the curves follow once nothing has
been turned for a moment. All is plain display output beside the widgets, so that it stays where no kernel runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as w
from IPython.display import DisplayHandle, display

from ..charts import lab_html
from ..common.errors import ServebookError
from ..hardware.catalog import Gpu
from . import forecasts, runs
from .setting import Setting, of_run

# How long nothing is turned before what takes longer is drawn: intervals and cases, then the curves
PAUSE_S, BREATH_S, CURVES_PAUSE_S = 0.15, 0.01, 0.4
WIDGET = "application/vnd.jupyter.widget-view+json"
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
OUTPUTS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CLIENTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SEATS = (16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
WITHOUT_KERNEL = "The controls need a running kernel: Run ▸ Run All Cells. What they last showed stands below."


class Panel:
    """Widgets bound to a Setting; shows itself as a cell's last line. redraws_s: how long each change took."""

    def __init__(self, setting: Setting) -> None:
        self.redraws_s: list[float] = []
        self._quiet = False
        self._rest: asyncio.Task[None] | None = None
        self._measured: dict[str, tuple[str, str, str]] = {}  # label of a sweep: run, engine, sweep
        self._handles = {name: DisplayHandle() for name in ("now", "cases", "curves")}
        self._build(setting)
        self._set(setting)
        for control in self._controls.values():
            control.observe(self._turned, "value")
        for control in (self.run, self.sweep):
            control.observe(self._loaded, "value")
        self.other.observe(lambda _: self._later(), "value")

    # --- the widgets --------------------------------------------------------------------------------------------

    def _build(self, s: Setting) -> None:
        def menu(label: str, options: Sequence[Any], width: str = "235px") -> Any:
            pairs = [o if isinstance(o, tuple) else (str(o), o) for o in options]
            return w.Dropdown(description=label, options=pairs, layout=w.Layout(width=width), style=_LABEL)

        def slider(label: str, options: Sequence[int]) -> Any:
            named = [(f"{o:,}", o) for o in options]
            return w.SelectionSlider(
                description=label, options=named, layout=w.Layout(width="400px"), style=_LABEL, continuous_update=True
            )

        def number(label: str, step: float) -> Any:
            return w.BoundedFloatText(
                description=label, min=0, max=1e6, step=step, layout=w.Layout(width="200px"), style=_LABEL
            )

        plain = [("vLLM's default", None)]
        self._controls: dict[str, Any] = {
            "model": menu("model", forecasts.all_models()),
            "gpu": menu("GPU", forecasts.all_gpus()),
            "engine": menu("engine", [("vLLM", "vllm"), ("naive server", "naive")]),
            "quantization": menu("weights", [("as they are", None), "fp8", "int8", "int4"]),
            "kv_cache_dtype": menu("KV cache", [("the model's type", "auto"), "fp8"]),
            "tensor_parallel_size": menu("GPUs (TP)", [1, 2, 4, 8]),
            "max_num_batched_tokens": menu("token budget", plain + [(f"{b:,}", b) for b in BUDGETS]),
            "max_num_seqs": menu("sequences", plain + [(f"{b:,}", b) for b in SEATS]),
            "max_model_len": menu("context", [("the model's", None)] + [(f"{b:,}", b) for b in CONTEXTS]),
            "prompt_tokens": slider("prompt tokens", PROMPTS),
            "output_tokens": slider("output tokens", OUTPUTS),
            "concurrency": slider("concurrency", CLIENTS),
            "rate_per_s": number("or requests/s", 0.5),
            "ttft_slo_s": number("TTFT ≤ ms", 50),
            "tpot_slo_s": number("TPOT ≤ ms", 5),
            "price_per_hour": number("price an hour", 0.1),
        }
        self.run = menu("measured run", ["none", *forecasts.all_runs()], "340px")
        self.sweep = menu("its sweep", ["–"], "340px")
        self.other = menu("compare with", ["–", *forecasts.all_gpus()])
        c = self._controls
        columns = [
            [c["model"], c["gpu"], c["engine"], c["quantization"], c["kv_cache_dtype"]],
            [c["tensor_parallel_size"], c["max_num_batched_tokens"], c["max_num_seqs"], c["max_model_len"], self.other],
        ]
        rows = [
            w.HBox([w.VBox(column) for column in columns] + [w.VBox([
                c["prompt_tokens"], c["output_tokens"], c["concurrency"],
                w.HBox([c["rate_per_s"], c["price_per_hour"]]), w.HBox([c["ttft_slo_s"], c["tpot_slo_s"]]),
            ])], layout=_WRAP),
            w.HBox([self.run, self.sweep], layout=_WRAP),
        ]  # fmt: skip
        self.controls = w.VBox(rows)

    @property
    def setting(self) -> Setting:
        """What the widgets say now."""
        values = {name: control.value for name, control in self._controls.items()}
        for name in ("ttft_slo_s", "tpot_slo_s"):
            values[name] = values[name] / 1e3 or None
        values["rate_per_s"] = values["rate_per_s"] or None
        return Setting(**values, dtype=self._dtype, run=None if self.run.value == "none" else self.run.value)

    def _set(self, s: Setting) -> None:
        """Turn every widget to a setting, without drawing."""
        self._quiet, self._dtype = True, s.dtype
        try:
            for name, control in self._controls.items():
                value = getattr(s, name)
                if name in ("ttft_slo_s", "tpot_slo_s"):
                    control.value = round(1e3 * (value or 0.0), 3)
                elif isinstance(control, w.BoundedFloatText):
                    control.value = value or 0.0
                else:
                    _choose(control, value)
            if s.run is not None and self.run.value != s.run:
                _choose(self.run, runs.load(s.run).name)
                self._list_sweeps()
        finally:
            self._quiet = False

    # --- what is turned -----------------------------------------------------------------------------------------

    def _turned(self, change: Any) -> None:
        if not self._quiet:
            self._redraw()

    def _loaded(self, change: Any) -> None:
        """Another run or sweep: its own setting, with its points."""
        if self._quiet:
            return
        try:
            if change["owner"] is self.run:
                self._list_sweeps()
            if self.sweep.value in self._measured:
                run, engine, sweep = self._measured[self.sweep.value]
                self._set(of_run(runs.load(run), engine, sweep))
        except ServebookError as error:
            self._show("now", _trouble(error))
            return
        self._redraw()

    def _list_sweeps(self) -> None:
        before, self._quiet = self._quiet, True
        try:
            self._measured = {}
            if self.run.value != "none":
                run = runs.load(self.run.value)
                for engine in forecasts.measured_engines(run):
                    for sweep in run.sweeps(engine):
                        self._measured[f"{sweep}, {engine}"] = (self.run.value, engine, sweep)
            names = list(self._measured) or ["–"]
            self.sweep.options = [(name, name) for name in names]
            self.sweep.value = names[0]
        finally:
            self._quiet = before

    # --- drawing ------------------------------------------------------------------------------------------------

    def _redraw(self) -> None:
        """The load's own figures at a glance, now; what takes longer, when the hand rests."""
        began = time.perf_counter()
        self._draw("now", lambda: forecasts.glance(self.setting))
        self.redraws_s.append(time.perf_counter() - began)
        self._later()

    def _later(self) -> None:
        """Draw the rest when nothing has been turned for a moment."""
        if self._rest:
            self._rest.cancel()
        try:
            self._rest = asyncio.get_running_loop().create_task(self._when_the_hand_rests())
        except RuntimeError:  # no loop, so no front end whose hand could rest
            for draw in (self._draw_whole, self._draw_cases, self._draw_curves):
                draw()

    async def _when_the_hand_rests(self) -> None:
        """In steps, between which a further change is heard and ends this."""
        await asyncio.sleep(PAUSE_S)
        self._draw_whole()
        await asyncio.sleep(BREATH_S)
        self._draw_cases()
        await asyncio.sleep(CURVES_PAUSE_S)
        self._draw_curves()

    def _draw_whole(self) -> None:
        self._draw("now", lambda: forecasts.predict(self.setting))

    def _draw_cases(self) -> None:
        other = [] if self.other.value == "–" else [self.other.value]
        self._draw("cases", lambda: forecasts.what_if(self.setting, gpus=other))

    def _draw_curves(self) -> None:
        self._draw("curves", self._curve)

    def _curve(self) -> Any:
        if self.sweep.value not in self._measured:
            return forecasts.curve(self.setting)
        run, engine, sweep = self._measured[self.sweep.value]
        return forecasts.against(run, sweep, engine, self.setting)

    def _draw(self, name: str, make: Callable[[], Any]) -> None:
        try:
            shown = make()
            self._show(name, lab_html.page([shown.html()], shown.text()))
        except ServebookError as error:
            self._show(name, _trouble(error))

    def _show(self, name: str, page: lab_html.Page) -> None:
        self._handles[name].update(page.bundle(), raw=True)

    def _ipython_display_(self) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.controls.model_id}
        display({WIDGET: view, "text/html": f"<p><i>{WITHOUT_KERNEL}</i></p>", "text/plain": WITHOUT_KERNEL}, raw=True)
        for handle in self._handles.values():
            handle.display({"text/plain": ""}, raw=True)
        for draw in (self._draw_whole, self._draw_cases, self._draw_curves):
            draw()


_LABEL = {"description_width": "96px"}
_WRAP = w.Layout(flex_flow="row wrap", grid_gap="0 12px")


def _choose(control: Any, value: Any) -> None:
    """Set a menu or slider, with the value as a further option where it is none yet."""
    options = list(control.options)
    if value not in [v for _, v in options]:
        options.append(
            (value.name if isinstance(value, Gpu) else f"{value:,}" if isinstance(value, int) else str(value), value)
        )
        if isinstance(control, w.SelectionSlider):
            options.sort(key=lambda o: o[1])
        control.options = options
    control.value = value


def _trouble(error: ServebookError) -> lab_html.Page:
    return lab_html.page([f'<p class="bad">{lab_html.text(error.line())}</p>'], error.line())


__all__ = ["Panel"]
