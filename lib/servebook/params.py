"""A run's parameters: typed, strict, read from one YAML file. The kinds of sweep stand in sweeps.py.

`load(path)` refuses anything it does not know, naming the key, its line and the nearest valid name,
before any work is done. Units are in the names; times are seconds, sizes bytes (GB = 1e9, GiB = 2**30).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from .errors import ServebookError
from .fields import Count, Seconds, Share, Strict
from .sweeps import ArrivalRateSweep, ConcurrencySweep, PrefixCacheSweep, PromptLengthSweep, Sweep

__all__ = [
    "ArrivalRateSweep", "BatchingEngine", "CalibrationPoint", "ConcurrencySweep", "Engine", "HardwareFigures",
    "HardwareParams", "Load", "ModelParams", "NaiveEngine", "OpenAIEngine", "PrefixCacheSweep", "PromptLengthSweep",
    "RunParams", "Slo", "Sweep", "VllmEngine", "dump", "load", "loads",
]  # fmt: skip


class ModelParams(Strict):
    """Which model. Exactly one of hub, path, config says where its shape (and weights) come from."""

    hub: str | None = None  # Hugging Face id, e.g. Qwen/Qwen2.5-7B-Instruct
    path: str | None = None  # local folder with config.json (relative to the parameter file)
    config: str | None = None  # a config packaged with servebook, e.g. qwen2.5-7b
    revision: str | None = None  # Hub commit, tag or branch
    weights: Literal["real", "dummy"] = "real"  # dummy: random values, nothing is downloaded
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: Literal["fp8", "int8", "int4"] | None = None  # weights only
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelParams:
        given = [k for k in ("hub", "path", "config") if getattr(self, k)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of hub, path, config (found {', '.join(given) or 'none'})")
        if self.config and self.weights == "real":
            raise ValueError("a packaged config has no weights: set weights: dummy")
        return self


class HardwareFigures(Strict):
    """Datasheet figures for hardware that the catalog does not hold."""

    name: str
    tensor_tflops: Annotated[float, Field(gt=0)]  # dense, in the model's dtype, 1e12 FLOP/s
    memory_bandwidth_gb_per_s: Annotated[float, Field(gt=0)]  # 1e9 bytes/s
    memory_gib: Annotated[float, Field(gt=0)]
    # to the other GPUs of its machine, one direction, 1e9 bytes/s; 16 lanes of PCIe 4 unless given
    link_gb_per_s: Annotated[float | None, Field(gt=0, exclude_if=lambda value: value is None)] = None
    source: str = "given in params"


class HardwareParams(Strict):
    gpu: str | None = None  # a catalog name, or "detect"
    figures: HardwareFigures | None = None
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    currency: str = "USD"

    @model_validator(mode="after")
    def _one_source(self) -> HardwareParams:
        if bool(self.gpu) == bool(self.figures):
            raise ValueError("give exactly one of gpu (a catalog name or detect) and figures")
        return self


class NaiveEngine(Strict):
    """Transformers behind one FIFO lock, batch 1."""

    batches: ClassVar[bool] = False
    prefix_caching: ClassVar[bool] = False
    kind: Literal["naive"]
    port: Count | None = None  # a free one is chosen unless given
    device: Literal["auto", "cpu", "cuda"] = "auto"
    startup_timeout_s: Seconds = 900
    restart_after_failure: bool = True  # once, for the next point; false: what is left of the session is left out


class BatchingEngine(Strict):
    """What any engine with continuous batching is told or assumed to do; the predictor reads it under these names.

    What is None is left to the engine's own default, which the predictor takes to be vLLM's.
    """

    batches: ClassVar[bool] = True
    kind: str
    port: Count | None = None  # a free one is chosen unless given
    max_num_batched_tokens: Count | None = None  # tokens of one step, over all requests
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    gpu_memory_utilization: Share = 0.9
    cpu_kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0  # only where the engine runs on the CPU
    prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    data_parallel_size: Count = 1
    env: dict[str, str] = {}
    startup_timeout_s: Seconds = 900
    restart_after_failure: bool = True  # once, for the next point; false: what is left of the session is left out


class VllmEngine(BatchingEngine):
    """The real vLLM server as a child process."""

    kind: Literal["vllm"]
    # left out of what a run stores unless given: points measured before it existed stay valid
    distributed_executor_backend: Annotated[
        Literal["mp", "ray", "uni"] | None, Field(exclude_if=lambda value: value is None)
    ] = None
    extra_args: list[str] = []  # further flags of vLLM's server, as typed


class OpenAIEngine(BatchingEngine):
    """Any other OpenAI-compatible server: one that runs at `url` and is left running, or one that `command` starts.

    The settings of BatchingEngine are what the predictor assumes of it; they reach the server only where `command`
    names them.
    """

    kind: Literal["openai"]
    url: str | None = None  # e.g. http://127.0.0.1:8000 (without /v1)
    # argv; {port}, {model} (folder or Hub id), {name} (to serve it under), and any field of these parameters
    command: Annotated[list[str], Field(min_length=1)] | None = None
    model: str | None = None  # the first of /v1/models unless given
    api_key_env: str | None = None  # name of the environment variable that holds the key

    @model_validator(mode="after")
    def _one_source(self) -> OpenAIEngine:
        if bool(self.url) == bool(self.command):
            raise ValueError("give exactly one of url (a server that runs) and command (one to start)")
        if self.command and self.api_key_env:
            raise ValueError("a server that command starts listens on this machine only: leave api_key_env out")
        return self


Engine = Annotated[NaiveEngine | VllmEngine | OpenAIEngine, Field(discriminator="kind")]


class CalibrationPoint(Strict):
    """A closed-loop measurement at C = 1 that the predictor may learn from."""

    prompt_tokens: Count
    output_tokens: Count
    requests: Count = 5


class Slo(Strict):
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    e2e_s: Seconds | None = None


class Load(Strict):
    jitter_s: Annotated[float, Field(ge=0)] = 0.05  # a client waits U(0, jitter) before its next request
    warmup_requests: Annotated[int, Field(ge=0)] = 10  # first max(C, this) completions are not measured
    min_requests: Count = 20  # measured completions a point needs at least
    max_requests: Count = 400
    min_seconds: Annotated[float, Field(ge=0)] = 10
    max_seconds: Seconds = 120  # warm-up included; a point ends here whatever it has
    request_timeout_s: Seconds = 600
    # vLLM runs its fused sampler only for requests that set top_p or top_k; with neither, and greedily, its native one
    # is measured. No request carries a seed of its own: that would switch the fused one off too.
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    scrape_interval_s: Seconds = 1.0
    seed: int = 1


class RunParams(Strict):
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # folder name under outputs/
    title: str
    description: str = ""
    model: ModelParams
    hardware: HardwareParams
    engines: Annotated[dict[str, Engine], Field(min_length=1)]
    calibration: list[CalibrationPoint] = []
    sweeps: dict[str, Sweep] = {}
    slo: Slo = Slo()
    load: Load = Load()

    @model_validator(mode="after")
    def _names_agree(self) -> RunParams:
        for name, sweep in self.sweeps.items():
            for engine in [*(sweep.engines or []), *sweep.minutes_per_engine]:
                if engine not in self.engines:
                    raise ValueError(
                        f"sweep {name} names the engine {engine!r}; this run has {', '.join(self.engines)}"
                    )
        return self


def load(path: Path | str) -> RunParams:
    """Read and validate a parameter file.

    Raises ServebookError with file, line and key for anything unreadable, unknown or mistyped; the first
    fault is shown, with the number of further ones.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = (
            f"Did you mean {path.parent / near[0]}?"
            if near
            else "Give the path of a parameter file such as params/demo.yaml"
        )
        raise ServebookError(f"cannot read the parameter file ({_reason(error)})", str(path), hint) from error
    return loads(text, str(path))


def loads(text: str, where: str = "params") -> RunParams:
    """As load, from the YAML text itself; `where` names it in messages."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}, line {mark.line + 1}" if mark else where
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ServebookError(
            f"not valid YAML ({problem})", at, "Mend the line, or compare it with params/demo.yaml"
        ) from error
    if not isinstance(data, dict):
        raise ServebookError("a parameter file is a mapping of keys", where, "Start from params/demo.yaml")
    _refuse_repeated_keys(root, where)
    try:
        return RunParams.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        unknown = [f for f in faults if f["type"] == "extra_forbidden"]
        what, line, fix = _explain((unknown or faults)[0], root)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ServebookError(what + more, f"{where}, line {line}", fix) from None


def dump(params: RunParams) -> str:
    """The resolved parameters as YAML, defaults included."""
    return yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "not UTF-8 text"


def _refuse_repeated_keys(node: yaml.Node | None, where: str) -> None:
    # PyYAML lets a second key win in silence; a run that ignores half of its sweeps is a lost run
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                at = f"{where}, line {key.start_mark.line + 1}"
                raise ServebookError(f"key {key.value!r} is given twice", at, "Keep one of them")
            seen.add(key.value)
            _refuse_repeated_keys(value, where)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated_keys(value, where)


def _explain(fault: Any, root: yaml.Node | None) -> tuple[str, int, str]:
    """(what, line, fix) of one pydantic fault, found again in the YAML text."""
    node, line, keys = root, 1, []
    for part in fault["loc"]:
        if isinstance(node, yaml.MappingNode):
            hit = next(((k, v) for k, v in node.value if k.value == str(part)), None)
            if hit:
                line, node = hit[0].start_mark.line + 1, hit[1]
                keys.append(str(part))
            elif fault["type"] == "missing" and part == fault["loc"][-1]:
                keys.append(str(part))
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
            keys[-1] += f"[{part}]"
    key = ".".join(keys) or "(whole file)"
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        valid = sorted(_fields_at(fault["loc"][:-1]))
        near = difflib.get_close_matches(str(fault["loc"][-1]), valid, n=1, cutoff=0.5)
        fix = f"Did you mean {near[0]}?" if near else f"Valid here: {', '.join(valid)}"
        return f"unknown key {key}", line, fix
    if kind == "missing":
        return f"key {key} is missing", line, "Add it"
    if kind == "union_tag_invalid":
        near = difflib.get_close_matches(
            str(context["tag"]), [t.strip(" '") for t in context["expected_tags"].split(",")], n=1
        )
        hint = f"Did you mean {near[0]}?" if near else f"Valid: {context['expected_tags']}"
        return f"{key}.kind is {context['tag']!r}, which does not exist", line, hint
    if kind == "union_tag_not_found":
        return f"{key} has no kind", line, "Add kind:, as in params/demo.yaml"
    message = fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    if isinstance(given, str) and kind in ("float_type", "int_type", "float_parsing"):
        hint = (
            "YAML reads 1e9 as text: write 1.0e+9"
            if "e" in given.lower() and given[:1].isdigit()
            else "Write a number without quotes"
        )
        return f"{key} is the text {given!r}, not a number", line, hint
    if kind.endswith(("_type", "literal_error")) and not isinstance(given, dict | list):
        return f"{key} is {given!r}: {message[0].lower()}{message[1:]}", line, "Mend the value"
    return f"{key}: {message[0].lower()}{message[1:]}", line, "Mend the value"


def _fields_at(loc: tuple[Any, ...]) -> set[str]:
    """Valid names at a place in the parameters, following the types as pydantic did."""
    here: Any = RunParams
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[part].annotation if part in here.model_fields else here
        else:
            args = getattr(here, "__args__", ())
            members = [a for a in _flatten(args) if isinstance(a, type) and issubclass(a, BaseModel)]
            tagged = [
                m for m in members if "kind" in m.model_fields and part in _literals(m.model_fields["kind"].annotation)
            ]
            if tagged:
                here = tagged[0]
            elif members and not isinstance(part, int) and len(members) > 1:
                continue  # the dict's own key, before the union's tag
            elif members:
                here = members[0]
    here = next((a for a in _flatten((here,)) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return set(here.model_fields) if here else set()


def _flatten(args: Any) -> list[Any]:
    flat: list[Any] = []
    for arg in args:
        inner = getattr(arg, "__args__", None)
        flat += _flatten(inner) if inner and not (isinstance(arg, type) and issubclass(arg, BaseModel)) else [arg]
    return flat


def _literals(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ())
