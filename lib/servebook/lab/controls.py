"""The controls of an exploration's panel: a widget for every setting, the runs to load, and the buttons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as w

from ..hardware.catalog import Gpu
from . import questions

PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
OUTPUTS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CLIENTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
MAX_SEQUENCES = (16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
DEFAULT = "default"  # None, which a menu shows as nothing chosen
ACTIONS = ("Reset", "Code", "CSV", "PNG", "Parameter file")
_LABEL = {"description_width": "96px"}
_WRAP = w.Layout(flex_flow="row wrap", grid_gap="0 12px")


class Controls:
    """The widgets. settings: one for each field of Setting; run, sweep: the run to read; other: a GPU to compare
    with; actions: buttons by name; message: their messages; box: all of them, arranged."""

    def __init__(self) -> None:
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

        plain = [("vLLM's default", DEFAULT)]
        self.settings: dict[str, Any] = {
            "model": w.Combobox(
                description="model",
                options=questions.all_models(),
                ensure_option=False,
                continuous_update=False,
                placeholder="packaged model, Hub id or folder",
                layout=w.Layout(width="235px"),
                style=_LABEL,
            ),
            "gpu": menu("GPU", questions.all_gpus()),
            "engine": menu("engine", [("vLLM", "vllm"), ("naive server", "naive")]),
            "quantization": menu("weights", [("as they are", DEFAULT), "fp8", "int8", "int4"]),
            "kv_cache_dtype": menu("KV cache", [("the model's type", "auto"), "fp8"]),
            "tensor_parallel_size": menu("GPUs (TP)", [1, 2, 4, 8]),
            "max_num_batched_tokens": menu("token budget", plain + [(f"{b:,}", b) for b in BUDGETS]),
            "max_num_seqs": menu("sequences", plain + [(f"{b:,}", b) for b in MAX_SEQUENCES]),
            "max_model_len": menu("context", [("the model's", DEFAULT)] + [(f"{b:,}", b) for b in CONTEXTS]),
            "prompt_tokens": slider("prompt tokens", PROMPTS),
            "output_tokens": slider("output tokens", OUTPUTS),
            "concurrency": slider("concurrency", CLIENTS),
            "rate_per_s": number("or requests/s", 0.5),
            "ttft_slo_s": number("TTFT ≤ ms", 50),
            "tpot_slo_s": number("TPOT ≤ ms", 5),
            "price_per_hour": number("price an hour", 0.1),
        }
        self.run = menu("measured run", ["none", *questions.all_runs()], "340px")
        self.sweep = menu("its sweep", ["–"], "340px")
        self.other = menu("compare with", ["–", *questions.all_gpus()])
        self.actions = {name: w.Button(description=name, layout=w.Layout(width="auto")) for name in ACTIONS}
        self.message = w.HTML()
        self.box = w.VBox(self._rows())

    def _rows(self) -> list[Any]:
        """The widgets in rows."""
        c = self.settings
        columns = [
            [c["model"], c["gpu"], c["engine"], c["quantization"], c["kv_cache_dtype"]],
            [c["tensor_parallel_size"], c["max_num_batched_tokens"], c["max_num_seqs"], c["max_model_len"], self.other],
        ]
        return [
            w.HBox([w.VBox(column) for column in columns] + [w.VBox([
                c["prompt_tokens"], c["output_tokens"], c["concurrency"],
                w.HBox([c["rate_per_s"], c["price_per_hour"]]), w.HBox([c["ttft_slo_s"], c["tpot_slo_s"]]),
            ])], layout=_WRAP),
            w.HBox([self.run, self.sweep], layout=_WRAP),
            w.HBox([*self.actions.values(), self.message], layout=_WRAP),
        ]  # fmt: skip


def choose(control: Any, value: Any) -> None:
    """Set a menu or slider to a value, which is added to the options if necessary."""
    value = DEFAULT if value is None else value
    options = list(control.options)
    if value not in [v for _, v in options]:
        options.append(
            (value.name if isinstance(value, Gpu) else f"{value:,}" if isinstance(value, int) else str(value), value)
        )
        if isinstance(control, w.SelectionSlider):
            options.sort(key=lambda o: o[1])
        control.options = options
    control.value = value


__all__ = ["DEFAULT", "Controls", "choose"]
