"""The published tables are scored from the command line, without a GPU and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servebook import published
from servebook.errors import ServebookError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("run", "bars"),
    [
        (
            "a40-qwen2.5-7b",
            {
                ("vllm", "ttft_s"): 0.06,
                ("vllm", "tpot_s"): 0.04,
                ("vllm", "decode_tok_per_s"): 0.04,
                ("hf", "ttft_s"): 0.03,
            },
        ),
        ("a100-qwen3-8b", {("vllm", "output_tok_per_s"): 0.045, ("vllm", "tpot_s"): 0.045}),
    ],
)
def test_published_points_are_predicted_from_c_1_alone(run, bars):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "servebook.cli",
            "predict",
            f"params/{run}.yaml",
            "--json",
            "--calibration",
            f"outputs/published/{run}.csv",
        ],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    errors = {(s["engine"], s["metric"]): s["mean_abs_error"] for s in json.loads(done.stdout)["scored"]}
    for key, bar in bars.items():
        assert errors[key] <= bar, key


def test_a_file_that_is_no_table_of_points_is_one_line(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ServebookError, match="lacks the columns concurrency"):
        published.read(tmp_path / "x.csv")
    with pytest.raises(ServebookError, match="cannot read measured points"):
        published.read(tmp_path / "y.csv")


def test_capacity_says_what_meets_the_service_level():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "servebook.cli",
            "capacity",
            "params/a40-qwen2.5-7b.yaml",
            "--gpu",
            "H200=3.5",
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    carried = {(r["engine"], r["case"]): r["by_rate"] for r in json.loads(done.stdout)}
    assert carried["vllm", "H200"]["rate_per_s"] > 5 * carried["vllm", "as it is"]["rate_per_s"]
    assert carried["vllm", "as it is"]["rate_per_s"] > 10 * carried["hf", "as it is"]["rate_per_s"]
