"""A stored run audited again: today's intervals and verdicts from its own rows, its figures untouched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from servebook import results
from servebook.reaudit import reaudit

REFERENCE = Path(__file__).parents[1] / "outputs/reference/h200-qwen2.5-7b-fp8"


def test_intervals_and_verdicts_follow_from_the_rows(tmp_path: Path) -> None:
    run = shutil.copytree(REFERENCE, tmp_path / "run")
    path = results.point_path(run, "long_prompts", "vllm", "c0064")
    kept = json.loads(path.read_text())
    # as if audited by an older rule: one round and a half had made a narrow interval
    old = kept | {"ttft_ci_low_s": kept["ttft_mean_s"] * 0.999, "ttft_ci_high_s": kept["ttft_mean_s"] * 1.001}
    path.write_text(json.dumps(old | {"verdict": "valid", "reasons": [], "converged": True}))
    (line,) = reaudit(run)
    assert line.startswith("long_prompts vllm c0064: valid → suspect (few rounds: 1.4 of the 64 clients")
    assert results.read_points(run) == results.read_points(REFERENCE)
    assert kept["ttft_ci_low_s"] is None and kept["ttft_mean_s"] > 4
    assert reaudit(run) == []
