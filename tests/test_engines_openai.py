"""An engine that is only a URL: found, asked, left running; what is missing is one line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from servebook import engines
from servebook.common.errors import ServebookError
from servebook.config import params
from servebook.config.params import RunParams
from servebook.engines import facts, process
from servebook.engines.ports import free_port
from servebook.hardware import catalog as hardware
from servebook.model import reader as model
from servebook.predictor import plan, predict
from servebook.run.book import Book
from test_engines_process import DOUBLE, double, gone


def running(run: RunParams, name: str, run_dir: Path) -> engines.RunningEngine:
    """The engine that runs for this folder, else a new one."""
    return engines.join(run_dir, name) or engines.start(run, name, run_dir, base=run_dir)


def run_params(**engine: object) -> params.RunParams:
    return params.RunParams.model_validate(
        {
            "run": "t", "title": "t", "hardware": {"gpu": "detect"},
            "model": {"config": "tiny-qwen2", "weights": "dummy"},
            "engines": {"far": {"kind": "openai", **engine}},
        }
    )  # fmt: skip


def test_found_asked_and_left_running(tmp_path: Path) -> None:
    with process.launch("e", double(), tmp_path / "theirs") as server:
        with running(run_params(url=f"{server.url}/v1/"), "far", tmp_path) as far:
            assert (far.url, far.model, far.owned, far.pid) == (server.url, "m", False, None)
            assert (
                far.facts["version"] == "9.9"
                and far.facts["max_model_len"] == 4096
                and far.facts["kv_cache_tokens"] is None
            )
            assert far.alive() and far.log_tail() == ""
        assert server.alive()
        stored = json.loads((tmp_path / "engines/far.json").read_text())
        assert stored["kind"] == "openai" and stored["url"] == server.url
        with pytest.raises(ServebookError, match=r"engines.far.model: the server has no model 'x'. It serves m"):
            engines.start(run_params(url=server.url, model="x"), "far", tmp_path, base=tmp_path)
    assert not far.alive()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(
        ServebookError, match=r"engines.far.url: no OpenAI-compatible server answers at http://127.0.0.1:9/v1"
    ):
        engines.start(run_params(url="http://127.0.0.1:9"), "far", tmp_path, base=tmp_path)


def test_key_from_the_environment_is_sent_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = run_params(url="http://127.0.0.1:9", api_key_env="FAR_KEY")
    with pytest.raises(ServebookError, match=r"FAR_KEY is not set"):
        engines.start(asked, "far", tmp_path, base=tmp_path)
    monkeypatch.setenv("FAR_KEY", "planted-4711")
    port = free_port()
    server = subprocess.Popen([sys.executable, DOUBLE, "--port", str(port), "--key", "planted-4711"])
    try:
        asked = run_params(url=f"http://127.0.0.1:{port}", api_key_env="FAR_KEY")
        for _ in range(100):
            try:
                far = engines.start(asked, "far", tmp_path, base=tmp_path)
                break
            except ServebookError:
                time.sleep(0.1)
        assert far.alive() and "planted-4711" not in (tmp_path / "engines/far.json").read_text()
    finally:
        server.kill()
        server.wait()


COMMAND = [sys.executable, DOUBLE, "--port", "{port}", "--model", "{name}"]


def test_started_by_its_command_joined_and_ended(tmp_path: Path) -> None:
    run = run_params(command=COMMAND, env={"MARK": "1"})
    with running(run, "far", tmp_path) as far:
        assert far.owned and far.model == "tiny-qwen2" and far.kind == "openai" and far.alive()
        assert far.facts["version"] == "9.9" and far.facts["max_model_len"] == 4096 and far.facts["flags"] == COMMAND
        assert far.facts["kv_cache_tokens"] is None and far.facts["startup_s"] > 0
        with running(run, "far", tmp_path) as again:
            assert not again.owned and again.url == far.url
        assert far.alive()
    assert gone(far.pid or 0) and (tmp_path / "engines/far.log").exists()


def test_a_server_may_name_its_model_itself_and_have_no_health_page(tmp_path: Path) -> None:
    run = run_params(command=[*COMMAND[:-1], "its-own", "--no-health"])
    with running(run, "far", tmp_path) as far:
        assert far.model == far.facts["model"] == "its-own"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve", "--port", "{prot}"], r"engines.far.command: {prot} has no value. Did you mean {port}"),
        (["serve", "{port}", "{max_num_seqs}"], r"{max_num_seqs} has no value. Set max_num_seqs for this engine"),
        (["serve"], r"engines.far.command: lacks {port}. Pass {port}"),
        (["no-such-program-4711", "{port}"], r"engines.far: ended at start .*cannot start no-such-program-4711"),
        (["python", "-m", "no_such_4711", "{port}"], r"ended at start .*No module named no_such_4711. Install it, or"),
    ],
)
def test_a_command_that_cannot_be_meant(tmp_path: Path, command: list[str], said: str) -> None:
    with pytest.raises(ServebookError, match=said):
        engines.start(run_params(command=command), "far", tmp_path, base=tmp_path)


def test_what_cannot_work_is_told_before_it_is_tried(tmp_path: Path) -> None:
    assert engines.check(run_params(command=["python", "{port}"]), "far") is None
    assert engines.check(run_params(command=["no-such-4711", "{port}"]), "far") == "there is no program no-such-4711"
    said = engines.check(run_params(url="http://127.0.0.1:9/v1"), "far")
    assert said == "nothing answers at http://127.0.0.1:9/v1/models"
    with process.launch("e", double(), tmp_path / "theirs") as server:
        assert engines.check(run_params(url=server.url), "far") is None


def test_url_or_command_and_no_key_in_either(tmp_path: Path) -> None:
    for both in ({}, {"url": "http://127.0.0.1:9", "command": COMMAND}, {"command": COMMAND, "api_key_env": "K"}):
        with pytest.raises(ValueError, match=r"exactly one of url|leave api_key_env out"):
            run_params(**both)
    text = yaml.safe_dump(run_params(command=["serve", "{port}", "--api-key=planted"]).model_dump(mode="json"))
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ServebookError, match=r"engines.far.command has --api-key, which would be stored"):
        Book.open(tmp_path / "x.yaml")


def test_predicted_with_the_given_settings_and_the_assumption_told() -> None:
    data = run_params(command=COMMAND, max_num_batched_tokens=1024, max_num_seqs=2, prefix_caching=False).model_dump()
    data["hardware"] = {"figures": {"name": "x", "tensor_tflops": 100, "memory_bandwidth_gb_per_s": 500,
                                    "memory_gib": 40}}  # fmt: skip
    data["sweeps"] = {
        "s": {"kind": "concurrency", "prompt_tokens": 256, "output_tokens": 64, "concurrency": [1, 8]},
        "p": {"kind": "prefix_cache", "prompt_tokens": 256, "output_tokens": 64, "concurrency": [2]},
    }
    run = params.RunParams.model_validate(data)
    shape, gpu = model.read_shape(run.model, Path()), hardware.resolve(run.hardware)
    said = predict.predict_run(run, shape, gpu, n_samples=2)
    limits = said["servers"]["far"]
    assert (limits["max_num_batched_tokens"], limits["max_num_seqs"]) == (1024, 2)
    assert [p["point"] for p in said["points"]] == ["c0001", "c0008", "fresh-c0002"]
    assert said["points"][1]["running_mean"] < 4 and "as if it were vLLM" in said["points"][0]["note"]
    started = {r["engine"]: r["wall_s"] for r in plan.plan(run, shape, gpu)["rows"] if r["point"] == "start"}
    assert started["far"] > 10  # a start takes time; a server that runs already takes none
    run = params.RunParams.model_validate(data | {"engines": {"far": {"kind": "openai", "url": "http://127.0.0.1:9"}}})
    assert plan.start_seconds(run, "far", shape, gpu) == 0


# of a real /get_server_info of SGLang on one GPU, shortened to what is read and some of what is not
SGLANG = json.loads("""
{"model_path": "qwen/qwen2.5-0.5b-instruct", "context_length": null, "dtype": "auto", "quantization": null,
 "kv_cache_dtype": "auto", "mem_fraction_static": 0.836, "max_running_requests": 128, "chunked_prefill_size": 8192,
 "max_prefill_tokens": 16384, "page_size": 1, "device": "cuda", "tp_size": 1, "attention_backend": "fa3",
 "disable_radix_cache": false, "cuda_graph_bs": [1, 2, 4], "disable_cuda_graph": true,
 "disable_overlap_schedule": false,
 "enable_mixed_chunk": false, "status": "ready", "max_total_num_tokens": 20480, "max_req_input_len": 20474,
 "internal_states": [{"max_total_tokens": 20480}], "version": "0.5.9"}
""")


def test_sglang_says_what_it_schedules_by() -> None:
    said = facts.from_sglang(SGLANG)
    assert {k: v for k, v in said.items() if v is not None} == {
        "version": "SGLang 0.5.9", "kv_cache_tokens": 20480, "max_num_batched_tokens": 8192, "chunked_prefill": True,
        "max_num_seqs": 128, "block_size": 1, "prefix_caching": True, "cuda_graphs": False, "async_scheduling": True,
        "attention_backend": "fa3", "device": "cuda",
    }  # fmt: skip
    assert facts.from_sglang({**SGLANG, "chunked_prefill_size": -1})["max_num_batched_tokens"] == 16384
    assert facts.from_sglang({}) == {} and set(said) <= set(facts.FACT_KEYS)
