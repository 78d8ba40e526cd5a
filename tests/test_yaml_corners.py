"""YAML that means something else than it says, or has no end, is one line; what YAML allows stays allowed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from servebook.common.errors import ServebookError
from servebook.common.files import ROOT
from servebook.config import params

DEMO = (ROOT / "params/demo.yaml").read_text(encoding="utf-8")


def refused(text: str, what: str) -> None:
    with pytest.raises(ServebookError, match=what) as told:
        params.read_text(text)
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x: &x [*x]", "an alias inside of what it names"),
        ("x: &x {a: *x}", "an alias inside of what it names"),
        ("x: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("x: " + "9" * 5000, "a number of 5,000 digits"),
        ("x: 010", "010 is read as octal. Write 10"),
        ("x: [001, -07]", "001 is read as octal. Write 1"),
        ("x: 12:30", "12:30 is read as sixties"),
        ("x: 2026-02-31", "not valid YAML"),
        ("? [a, b]\n: 1", "a key that is a list"),
        ("title: two", "key 'title' is given twice"),
        ("x: " + "a" * 300_000, "characters long"),
        ('x: "\\ud800"', "."),
        ("x: !!python/object/apply:os.system [id]", "not valid YAML"),
    ],
)
def test_one_line(line: str, what: str) -> None:
    refused(f"{DEMO}\n{line}\n", what)


def test_aliases_that_multiply_are_counted_and_not_written_out() -> None:
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
    bomb += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30))
    began = time.process_time()
    refused(f"{DEMO}\n{bomb}", "expands to more than 50,000 values")
    assert time.process_time() - began < 60  # written out it would take longer than there is time


def test_a_merge_is_overridden_by_the_keys_beside_it() -> None:
    text = DEMO.replace("load:", "load:\n  <<: {jitter_s: 0.25, seed: 5}\n  seed: 9", 1)
    load = params.read_text(text).load
    assert load.seed == 9 and load.jitter_s in (0.25, params.read_text(DEMO).load.jitter_s)


@pytest.mark.parametrize(("seed", "good"), [(-1, False), (0, True), (2**63, False)])
def test_a_seed_is_a_whole_number_from_0_on(seed: int, good: bool) -> None:
    text = DEMO.replace("load:", f"load:\n  seed: {seed}", 1)
    if good:
        assert params.read_text(text).load.seed == seed
    else:
        refused(text, "load.seed")


def test_a_file_that_is_not_utf8_or_has_no_end(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(b"run: a\ntitle: L\xe4ufer\n")
    for path, what in (
        (file, r"p\.yaml, line 2: is not UTF-8"),
        (Path("/dev/zero"), "characters"),
        (tmp_path, "folder|directory"),
    ):
        with pytest.raises(ServebookError, match=f"(?i){what}"):
            params.read_file(path)


def test_the_field_with_the_fault_is_named_also_in_a_kind_of_the_same_name() -> None:
    for old, new, key in (
        ("prompt_tokens: 64", "prompt_tokens: 1e3", "prompt_tokens is the text"),
        ("output_tokens: 16", "output_tokens: -8", "output_tokens: "),
    ):
        sweep = "kind: concurrency, prompt_tokens: 64, output_tokens: 16, concurrency: [1]"
        refused(DEMO.replace("sweeps:", f"sweeps:\n  odd: {{{sweep.replace(old, new)}}}", 1), f"sweeps.odd.{key}")
