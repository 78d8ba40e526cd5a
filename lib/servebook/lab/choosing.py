"""A choice in JupyterLab: a parameter file's answer, and widgets that turn its level, load, cards and precisions."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as w
from IPython.display import DisplayHandle, display
from matplotlib.figure import Figure

from .. import charts
from ..charts import lab_html
from ..common.errors import ServebookError
from ..config.search_space import SearchSpace
from ..config.service_level import Slo, TargetLoad
from ..hardware import prices
from ..predictor import choice_answer
from ..predictor.choice import Choice
from ..report import choice as pages
from ..report.markup import Html
from ..run import choice_files
from ..run.book import Book, outputs_folder
from ..run.choosing import choice_for, kept_points

WITHOUT_KERNEL = "The controls need a running kernel: Run ▸ Run All Cells. The last answer stays below."
STALE = "Press Search: what is shown is of the settings before."
LIMITS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def _wide(label: int, field: int = 80) -> dict[str, Any]:
    """Room for a control's label and its field, in pixels."""
    return {"style": {"description_width": f"{label}px"}, "layout": w.Layout(width=f"{label + field + 16}px")}


class ChoiceView:
    """A choice with its details; displays itself in a cell. found: the result of choice_answer.answer."""

    def __init__(self, choice: Choice, base: Path, measured: Sequence[Mapping[str, Any]] = ()) -> None:
        self.choice, self.base, self.measured = choice, base, measured
        self.found = choice_answer.answer(choice)
        self.found["serve"] = choice_files.serve_command(choice, choice.chosen.set_up)

    def figure(self) -> Figure:
        """What one user sees against what a card gives, for charts.show."""
        return pages.figure(self.found, self.measured)

    def lead(self) -> Html:
        """The answer in sentences, with the command that serves it."""
        return Html(str(pages.lead(self.choice, self.found)) + str(pages.command(self.found["serve"])))

    def rivals(self) -> Html:
        """The best of every other kind of set-up, and what would make each win."""
        return pages.rivals_table(self.choice, self.found)

    def set_ups(self) -> Html:
        """The cheapest of those that were simulated."""
        return pages.set_ups_table(self.choice, self.found)

    def dropped(self) -> Html:
        """Why set-ups do not fit, with how many."""
        return pages.dropped_table(self.choice, self.found)

    def basis(self) -> Html:
        """Prices, seed, and what the probabilities are made of."""
        return pages.basis(self.choice)

    def html(self) -> str:
        """The answer, the command, the chart and the rivals."""
        chart = charts.html_figure(self.figure())
        return f'{self.lead()}{chart}<div class="wide">{self.rivals()}</div>{self.basis()}'

    def write_params(self, folder: str | Path) -> list[Path]:
        """Parameter files that measure the choice and its two nearest rivals."""
        return choice_files.write_params(self.choice, self.base, Path(folder))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return lab_html.page([self.html()], self.found["chosen"]["name"]).bundle()


def choose(params: str | Path, gpus: Sequence[str] = (), max_gpus: int | None = None) -> ChoiceView:
    """The cheapest set-up for a parameter file's slo and target load, as `servebook choose`."""
    book = Book.open(params)
    choice = choice_for(book, str(params), gpus, max_gpus)
    return ChoiceView(choice, book.base, kept_points(book, [outputs_folder(), outputs_folder() / "reference"]))


class ChoicePanel:
    """Widgets bound to a parameter file's question. `Search` asks it again; nothing runs while a control is turned."""

    def __init__(self, params: str | Path, answer: ChoiceView | None = None) -> None:
        self._path = str(params)
        self._book = Book.open(params)
        given, space = self._book.params, self._book.params.choose or SearchSpace()
        if given.slo.target is None:
            raise ServebookError("no target load", f"{params}, slo", "Set slo: {target: {rate_per_s: 10}}")
        self.answer = answer
        target = given.slo.target
        self.controls: dict[str, Any] = {}
        for name, label in LIMITS.items():
            limit, percentile = given.slo.limits.get(f"{name}_s", (0.0, given.slo.percentile))
            self.controls[f"{name}_s"] = w.BoundedFloatText(
                value=1e3 * limit, min=0, max=1e7, description=f"{label} ≤ ms", **_wide(120)
            )
            self.controls[f"{name}_percentile"] = w.BoundedFloatText(
                value=percentile, min=1, max=99.9, description="at percentile", **_wide(90)
            )
        self.controls["rate_per_s"] = w.BoundedFloatText(
            value=target.rate_per_s or 0.0, min=0, max=10_000, description="requests/s", **_wide(100)
        )
        self.controls["users"] = w.BoundedIntText(
            value=target.users or 0, min=0, max=20_000, description="or users", **_wide(100)
        )
        own = [] if given.hardware.gpu == "detect" or self._book.gpu.is_cpu else [self._book.gpu.name]
        cards = sorted({*prices.list_prices(), *space.gpus, *(own if given.hardware.price_per_hour else [])})
        self.controls["gpus"] = w.SelectMultiple(
            options=cards,
            value=tuple(c for c in cards if not space.gpus or c in space.gpus),
            rows=6,
            description="cards",
            **_wide(45, 160),
        )
        self.controls["max_gpus"] = w.BoundedIntText(
            value=space.max_gpus, min=1, max=1024, description="cards at most", **_wide(100)
        )
        self.controls["fp8"] = w.Checkbox(
            value="fp8" in space.quantization, description="fp8 weights and KV allowed", indent=False
        )
        self.search, self.save = w.Button(description="Search", button_style="primary"), w.Button(description="Save")
        self.folder = w.Text(value=f"{given.run}-choice", description="into", **_wide(30, 220))
        self.message = w.HTML()
        self._shown = DisplayHandle()
        self.search.on_click(lambda _: self.ask())
        self.save.on_click(functools.partial(self._write))
        c = self.controls
        self.box = w.VBox([
            w.HBox([
                w.VBox([w.HBox([c[f"{name}_s"], c[f"{name}_percentile"]]) for name in LIMITS]),
                w.VBox([c["rate_per_s"], c["users"], c["max_gpus"], c["fp8"]]), c["gpus"],
            ], layout=w.Layout(flex_flow="row wrap")),
            w.HBox([self.search, self.save, self.folder], layout=w.Layout(flex_flow="row wrap")), self.message,
        ])  # fmt: skip
        for control in self.controls.values():
            control.observe(self._turned, "value")

    def _turned(self, _: Any) -> None:
        self.message.value = STALE

    def _asked(self) -> Any:
        """The parameters as the controls have them."""
        c, slo = self.controls, self._book.params.slo
        limits = {f"{name}_s": c[f"{name}_s"].value / 1e3 or None for name in LIMITS}
        target = slo.target or TargetLoad(rate_per_s=1.0)
        rate, users = float(c["rate_per_s"].value), int(c["users"].value)
        if rate and users:
            raise ServebookError("requests/s and users are two loads", "", "Set one of them to 0")
        if not (rate or users or target.trace_speed):
            raise ServebookError("a target load of zero needs no server", "", "Give requests/s, or users")
        load: dict[str, Any] = {"users": users}
        if rate:
            load = {"rate_per_s": rate, "arrivals": target.arrivals, "gamma_shape": target.gamma_shape}
        if not (rate or users):
            load = {"trace_speed": target.trace_speed}
        if not c["gpus"].value:
            raise ServebookError("no card is selected", "", "Select at least one")
        level = slo.model_dump(exclude={"target", *limits}) | limits
        level |= {f"{name}_percentile": float(c[f"{name}_percentile"].value) for name in LIMITS}
        asked = {"slo": Slo(**level, target=TargetLoad(workload=target.workload, **load))}
        return self._book.params.model_copy(update=asked)

    def ask(self) -> None:
        """Search with the controls' values, and show the answer."""
        self.message.value = "searching …"
        c, space = self.controls, self._book.params.choose or SearchSpace()
        given = {name: space.gpus.get(name) for name in c["gpus"].value}
        fp8 = {} if c["fp8"].value else {"quantization": ["none"], "kv_cache_dtype": ["auto"]}
        try:
            run = Book(self._asked(), self._book.dir, self._book.base)
            asked = space.model_copy(update={"gpus": given, "max_gpus": c["max_gpus"].value, **fp8})
            kept = kept_points(run, [outputs_folder(), outputs_folder() / "reference"])
            self.answer = ChoiceView(choice_for(run, self._path, space=asked), run.base, kept)
            self._shown.update(lab_html.page([self.answer.html()], "").bundle(), raw=True)
            self.message.value = ""
        except (ServebookError, ValueError) as error:
            line = error.line() if isinstance(error, ServebookError) else str(error).splitlines()[-1]
            self._fault(line)

    def _write(self, _: Any = None) -> None:
        if self.answer is None:
            self.message.value = "Search first"
            return
        try:
            written = ", ".join(str(p) for p in self.answer.write_params(self.folder.value))
            self.message.value = f"written: {lab_html.text(written)}"
        except ServebookError as error:
            self._fault(error.line())

    def _fault(self, line: str) -> None:
        self.message.value = f'<span style="color:var(--jp-error-color1,#b3261e)">{lab_html.text(line)}</span>'

    def _ipython_display_(self) -> None:
        if not os.environ.get("JPY_SESSION_NAME"):
            return  # a run executes the notebook for its page, where no hand turns a control
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        mime = "application/vnd.jupyter.widget-view+json"
        display({mime: view, "text/html": f"<p><i>{WITHOUT_KERNEL}</i></p>", "text/plain": WITHOUT_KERNEL}, raw=True)
        self._shown.display({"text/plain": ""}, raw=True)


def panel(params: str | Path, answer: ChoiceView | None = None) -> ChoicePanel:
    """The widgets for a parameter file's question; answer: what Save writes before anything is searched."""
    return ChoicePanel(params, answer)


__all__ = ["ChoicePanel", "ChoiceView", "choose", "panel"]
