"""The widgets of an exploration, with controls for every setting; results are redrawn when a control changes.

While a control moves, the load's figures follow as a quick estimate, and the previous drawing is faint. When no
control has moved for a moment, one simulation updates the tiles, the comparison and the curves. All results are plain
display output, so that they remain visible without a kernel."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as w
from IPython.display import DisplayHandle, display

from ..charts import lab_html
from ..common.errors import ServebookError
from . import asking, curves, params_file, questions, runs
from .controls import DEFAULT, Controls, choose
from .setting import Setting, of_run

# How long nothing is turned before what takes longer is drawn: intervals and cases, then the curves
PAUSE_S, BREATH_S, CURVES_PAUSE_S = 0.15, 0.01, 0.4
WIDGET = "application/vnd.jupyter.widget-view+json"
WITHOUT_KERNEL = "The controls need a running kernel: Run ▸ Run All Cells. The last result stays below."


class Panel:
    """Widgets bound to a Setting; shows itself as a cell's last line. redraws_s: how long each change took."""

    def __init__(self, setting: Setting) -> None:
        self.redraws_s: list[float] = []
        self._quiet, self._start, self._count = False, setting, 0
        self._rest: asyncio.Task[None] | None = None
        self._measured: dict[str, tuple[str, str, str]] = {}  # label of a sweep: run, engine, sweep
        self._handles = {name: DisplayHandle() for name in ("now", "cases", "curves")}
        built = Controls()
        self._controls, self.run, self.sweep, self.other = built.settings, built.run, built.sweep, built.other
        self.actions, self.message, self.controls = built.actions, built.message, built.box
        self._set(setting)
        for control in self._controls.values():
            control.observe(self._turned, "value")
        for control in (self.run, self.sweep):
            control.observe(self._loaded, "value")
        self.other.observe(lambda _: self._later(), "value")
        for name, button in self.actions.items():
            button.on_click(functools.partial(self._act, name))

    @property
    def setting(self) -> Setting:
        """The setting of the widgets' current values."""
        shown = {name: control.value for name, control in self._controls.items()}
        values: dict[str, Any] = {name: None if value == DEFAULT else value for name, value in shown.items()}
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
                elif isinstance(control, w.Combobox):
                    control.value = value
                else:
                    choose(control, value)
            name = "none" if s.run is None else runs.read_run(s.run).name
            if self.run.value != name:
                choose(self.run, name)
                self._list_sweeps()
        finally:
            self._quiet = False

    # --- what is turned -----------------------------------------------------------------------------------------

    def _turned(self, change: Any) -> None:
        if self._quiet:
            return
        if change["owner"] is self._controls["gpu"]:  # the price was the other GPU's
            self._quiet = True
            self._controls["price_per_hour"].value = 0.0
            self._quiet = False
        self._redraw()

    def _act(self, name: str, _: Any = None) -> None:
        """Run the action of one of the buttons below the controls; its result is shown next to them."""
        try:
            actions = {
                "Reset": self._reset, "Code": self._code, "CSV": self._export_csv, "PNG": self._export_png,
                "Parameter file": self._export_params,
            }  # fmt: skip
            message = actions[name]()
        except (ServebookError, OSError) as error:
            message = f'<span style="color:var(--jp-error-color1,#b3261e)">{lab_html.text(_line(error))}</span>'
        self.message.value = message

    def _reset(self) -> str:
        self._set(self._start)
        self._redraw()
        return ""

    def _code(self) -> str:
        """Selected as a whole by one click."""
        return f'<code style="user-select:all">{lab_html.text(asking.code(self.setting))}</code>'

    def _stem(self) -> str:
        return f"explore-{Path(self.setting.model).name}-{self.setting.card.name}"

    def _export_csv(self) -> str:
        return _written(self._curve().to_csv(f"{self._stem()}.csv"))

    def _export_png(self) -> str:
        return _written(*self._curve().to_png(f"{self._stem()}.png"))

    def _export_params(self) -> str:
        return _written(params_file.write(self.setting, f"{self._stem()}.yaml"))

    def _loaded(self, change: Any) -> None:
        """Another run or sweep: its own setting, with its points."""
        if self._quiet:
            return
        try:
            if change["owner"] is self.run:
                self._list_sweeps()
            if self.sweep.value in self._measured:
                run, engine, sweep = self._measured[self.sweep.value]
                self._set(of_run(runs.read_run(run), engine, sweep))
        except ServebookError as error:
            self._show("now", lab_html.page([_trouble(error)], error.line()))
            return
        self._redraw()

    def _list_sweeps(self) -> None:
        before, self._quiet = self._quiet, True
        try:
            self._measured = {}
            if self.run.value != "none":
                run = runs.read_run(self.run.value)
                for engine in curves.measured_engines(run):
                    for sweep in run.sweeps(engine):
                        self._measured[f"{sweep}, {engine}"] = (self.run.value, engine, sweep)
            names = list(self._measured) or ["–"]
            self.sweep.options = [(name, name) for name in names]
            self.sweep.value = names[0]
        finally:
            self._quiet = before

    # --- drawing ------------------------------------------------------------------------------------------------

    def _redraw(self) -> None:
        """The load's own figures as a quick estimate, now; the prediction and the rest when nothing is turned."""
        began = time.perf_counter()
        self._count += 1
        self._draw("now", lambda: questions.quick_predict(self.setting))
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
        """Wait in short steps until no control has changed for a moment; a further change ends the wait."""
        await asyncio.sleep(PAUSE_S)
        self._draw_whole()
        with contextlib.suppress(ServebookError):  # the case's own row says why
            for changes in questions.usual_cases(self.setting).values():
                await asyncio.sleep(BREATH_S)
                questions.forecast(asking.changed(self.setting, changes))  # kept for the table
        await asyncio.sleep(BREATH_S)
        self._draw_cases()
        await asyncio.sleep(CURVES_PAUSE_S)
        self._draw_curves()

    def _draw_whole(self) -> None:
        self._draw("now", lambda: questions.forecast(self.setting))

    def _draw_cases(self) -> None:
        other = [] if self.other.value == "–" else [self.other.value]
        self._draw("cases", lambda: questions.what_if(self.setting, gpus=other))

    def _draw_curves(self) -> None:
        self._draw("curves", self._curve)

    def _curve(self) -> curves.Curve:
        if self.sweep.value not in self._measured:
            return curves.curve(self.setting)
        run, engine, sweep = self._measured[self.sweep.value]
        return curves.against(run, sweep, engine, self.setting)

    def _draw(self, name: str, make: Callable[[], Any]) -> None:
        try:
            shown = make()
            self._show(name, lab_html.page([self._layer(name, shown.html())], shown.text()))
        except ServebookError as error:
            self._show(name, lab_html.page([self._layer(name, _trouble(error))], error.line()))

    def _layer(self, name: str, html: str) -> str:
        """What was drawn for an earlier setting is faint until it is drawn again: one setting, one set of figures."""
        if name != "now":
            return f'<div class="sb-of-{id(self)} n{self._count}">{html}</div>'
        return f"<style>.sb-of-{id(self)}:not(.n{self._count}){{opacity:.3}}</style>{html}"

    def _show(self, name: str, page: lab_html.Page) -> None:
        self._handles[name].update(page.bundle(), raw=True)

    def _ipython_display_(self) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.controls.model_id}
        display({WIDGET: view, "text/html": f"<p><i>{WITHOUT_KERNEL}</i></p>", "text/plain": WITHOUT_KERNEL}, raw=True)
        for handle in self._handles.values():
            handle.display({"text/plain": ""}, raw=True)
        for draw in (self._draw_whole, self._draw_cases, self._draw_curves):
            draw()


@asking.shows_settings
def panel(model: str | Setting | None = None, **settings: Any) -> Panel:
    """The widgets with controls for every setting and results that follow. settings: initial values."""
    return Panel(asking.setting_from(model, settings))


def _line(error: Exception) -> str:
    return error.line() if isinstance(error, ServebookError) else str(error)


def _trouble(error: ServebookError) -> str:
    return f'<p class="bad">{lab_html.text(error.line())}</p>'


__all__ = ["Panel", "panel"]


def _written(*paths: Path) -> str:
    return f"written beside the notebook: {lab_html.text(', '.join(p.name for p in paths))}"
