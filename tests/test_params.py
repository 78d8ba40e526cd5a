"""A parameter file is taken whole or refused with one line: key, line, nearest name."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from servebook.common.errors import ServebookError
from servebook.config import params

ROOT = Path(__file__).parents[1]
DEMO = (ROOT / "params/demo.yaml").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "params").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_files_are_valid_and_survive_a_round_trip(path):
    run = params.read_file(path)
    assert run.run == path.stem
    assert params.read_text(params.dump(run), base=path.parent) == run


@pytest.mark.parametrize(
    ("old", "new", "line_of", "expect"),
    [
        (
            "warmup_requests: 4",
            "warmup_request: 4",
            "warmup_request:",
            "unknown key load.warmup_request. Did you mean warmup_requests?",
        ),
        ("run: demo", "run: demo\nswweps: {}", "swweps", "unknown key swweps. Did you mean sweeps?"),
        (
            "max_num_seqs: 16",
            "max_num_sequences: 16",
            "max_num_sequences",
            "unknown key engines.vllm.max_num_sequences. Did you mean max_num_seqs?",
        ),
        (
            "    concurrency: [1, 2, 4, 8]\n    minutes_per_engine: {hf: 0.5}\n  long",
            "    concurency: [1, 2, 4, 8]\n  long",
            "concurency",
            "unknown key sweeps.short_prompts.concurency",
        ),
        (
            "max_num_seqs: 16",
            'max_num_seqs: "16"',
            "max_num_seqs",
            "engines.vllm.max_num_seqs is the text '16', not a number",
        ),
        ("max_num_seqs: 16", "max_num_seqs: 1.5", "max_num_seqs", "engines.vllm.max_num_seqs is 1.5"),
        ("max_num_seqs: 16", "max_num_seqs: 0", "max_num_seqs", "engines.vllm.max_num_seqs"),
        ("price_per_hour: 0.10", "price_per_hour: 1e-1", "price_per_hour", "YAML reads 1e9 as text"),
        ("kind: naive", "kind: naiv", "  hf:", "engines.hf.kind is 'naiv', which does not exist. Did you mean naive?"),
        (
            "config: tiny-qwen2",
            "config: tiny-qwen2\n  hub: a/b",
            "model:",
            "give exactly one of hub, path, config (found hub, config)",
        ),
        (
            "minutes_per_engine: {hf: 0.5}\n  long",
            "minutes_per_engine: {hff: 0.5}\n  long",
            "run:",
            "names the engine 'hff'",
        ),
        ("requests: 8}", "request: 8}", "request: 8", "unknown key calibration[0].request. Did you mean requests?"),
        ("title: A", "run: twice\ntitle: A", "run: twice", "key 'run' is given twice"),
        ("title: A", "title: [A", None, "not valid YAML"),
    ],
)
def test_a_fault_is_one_line_with_key_line_and_nearest_name(old, new, line_of, expect):
    assert old in DEMO
    text = DEMO.replace(old, new, 1)
    with pytest.raises(ServebookError) as fault:
        params.read_text(text, "x.yaml")
    message = str(fault.value)
    assert "\n" not in message
    assert expect in message
    if line_of:
        line = next(i for i, row in enumerate(text.splitlines(), 1) if line_of in row)
        if line_of != "run:":
            assert f"x.yaml, line {line}:" in message


def test_a_missing_file_names_its_neighbour():
    with pytest.raises(ServebookError, match=r"Did you mean .*demo\.yaml"):
        params.read_file(ROOT / "params/demoo.yaml")


@pytest.mark.parametrize(
    ("old", "new", "expect"),
    [
        ("run: demo", "run: reference", "run: 'reference' is a folder of outputs/"),
        ("run: demo", "run: Published", "run: 'Published' is a folder of outputs/"),
        ("run: demo", "run: ../x", "run: '../x' is not a valid name. Use letters"),
        ("  long_prompts:", "  ../../x:", "sweeps.../../x: '../../x' is not a valid name"),
        ("  long_prompts:", "  a/b:", "'a/b' is not a valid name"),
        ("  long_prompts:", "  ..:", "'..' is not a valid name"),
        ("  long_prompts:", "  calibration:", "a sweep named calibration would mix"),
        ("  vllm:", "  ../vllm:", "engines.../vllm: '../vllm' is not a valid name"),
        (
            "concurrency: [1, 2, 4, 8]",
            "concurrency: [1, 1000000]",
            "concurrency[1]: input should be less",
        ),
        ("concurrency: [1, 2, 4, 8]", "concurrency: [1, 2, 2]", "concurrency: 2 is given twice. Keep one"),
        ("concurrency: [1, 2, 4, 8]", "concurrency: 4", "concurrency is 4, not a list. Write [4]"),
        ("prompt_tokens: [64, 256,", "prompt_tokens: [256, 256,", "prompt_tokens: 256 is given twice"),
        ("shares_of_capacity: [0.3, 0.6]", "rates_per_s: [0.3, 0.3]", "rates_per_s: 0.3 is given twice"),
        ("shares_of_capacity: [0.3, 0.6]", "rates_per_s: [0.0001, 0.0002]", "rates_per_s: 0.0002 is given twice"),
        ("shares_of_capacity: [0.3, 0.6]", "rates_per_s: [1.0e+9]", "rates_per_s[0]: input should be less than"),
        (
            "shares_of_capacity: [0.3, 0.6]",
            "rates_per_s: [1]\n    gamma_shape: 0.5",
            "Set arrivals: gamma, or leave it out",
        ),
        ("warmup_requests: 4", "warmup_requests: 1000000000", "load.warmup_requests: input should be less than"),
        (
            "max_requests: 40",
            "max_requests: 11",
            "min_requests (12) is more than max_requests (11).",
        ),
        ("max_seconds: 8", "max_seconds: 1", "min_seconds (2) is more than max_seconds (1)"),
        ("max_seconds: 8", "max_seconds: .inf", "load.max_seconds: input should be a finite number"),
        ("min_seconds: 2", "min_seconds: .nan", "load.min_seconds: input should be a finite number"),
        ("price_per_hour: 0.10", "price_per_hour: .inf", "hardware.price_per_hour: input should be a finite"),
        ("kind: naive", "kind: naive\n    port: 65536", "engines.hf.port: input should be less than or equal to 65535"),
    ],
)
def test_what_no_run_can_mean_is_refused_at_check(old: str, new: str, expect: str) -> None:
    """Each of these hung, overwrote another run, or failed only when an engine was up."""
    assert old in DEMO
    with pytest.raises(ServebookError) as fault:
        params.read_text(DEMO.replace(old, new, 1), "x.yaml")
    assert expect in str(fault.value) and "\n" not in str(fault.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h:1", "http://h:65536", "http://h:0", "http://", "/tmp/x"])
def test_a_url_is_one_of_a_server(url: str) -> None:
    text = DEMO.replace("    kind: naive\n", f"    kind: openai\n    url: {url}\n", 1)
    text = "\n".join(line for line in text.splitlines() if "device:" not in line)
    with pytest.raises(ServebookError, match=r"engines\.hf\.url: this is not a server's URL\. Write http://HOST:PORT"):
        params.read_text(text)


def test_c_1_points_of_one_name_are_refused() -> None:
    point = "{prompt_tokens: 64, output_tokens: 8, requests: %d}"
    text = params.dump(params.read_text(DEMO)).replace(
        "calibration:\n", f"calibration:\n- {point % 3}\n- {point % 4}\n", 1
    )
    with pytest.raises(ServebookError, match="calibration: 64 in, 8 out is given twice"):
        params.read_text(text)


def test_every_number_of_a_file_is_finite() -> None:
    """A bound lets .nan or .inf through unless the type forbids it: walks every field, a new one too."""

    def fields(kind: Any) -> Iterator[tuple[str, Any, FieldInfo]]:
        for name, field in kind.model_fields.items():
            yield f"{kind.__name__}.{name}", kind, field
            for part in parts(field.annotation):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    yield from fields(part)

    def parts(annotation: Any) -> set[Any]:
        inner = get_args(annotation)
        return {annotation}.union(*map(parts, inner)) if inner else {annotation}

    checked = set()
    for name, kind, field in fields(params.RunParams):
        if float in (shapes := parts(field.annotation)):
            wrap = next((w for k, w in ((list, lambda v: [v]), (dict, lambda v: {"hf": v}))
                         if any(get_origin(s) is k for s in shapes)), lambda v: v)  # fmt: skip
            for value in (math.nan, math.inf, -math.inf):
                with pytest.raises(ValidationError) as fault:
                    kind.model_validate({name.partition(".")[2]: wrap(value)})
                at = {e["loc"][0] for e in fault.value.errors() if e["type"] != "missing"}
                assert name.partition(".")[2] in at, (name, value)
            checked.add(name)
    assert {"Load.top_p", "Slo.ttft_s", "ArrivalRateSweep.rates_per_s", "HardwareFigures.memory_gib"} <= checked
    assert len(checked) >= 25
