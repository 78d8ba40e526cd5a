"""A parameter file is taken whole or refused with one line: key, line, nearest name."""

from pathlib import Path

import pytest
from servebook import params
from servebook.errors import ServebookError

ROOT = Path(__file__).parents[1]
DEMO = (ROOT / "params/demo.yaml").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "params").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_files_are_valid_and_survive_a_round_trip(path):
    run = params.load(path)
    assert run.run == path.stem
    assert params.loads(params.dump(run)) == run


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
        params.loads(text, "x.yaml")
    message = str(fault.value)
    assert "\n" not in message
    assert expect in message
    if line_of:
        line = next(i for i, row in enumerate(text.splitlines(), 1) if line_of in row)
        if line_of != "run:":
            assert f"x.yaml, line {line}:" in message


def test_a_missing_file_names_its_neighbour():
    with pytest.raises(ServebookError, match=r"Did you mean .*demo\.yaml"):
        params.load(ROOT / "params/demoo.yaml")
