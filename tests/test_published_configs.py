"""Published config.json files: read as the libraries read them that serve and store such models."""

from __future__ import annotations

import json
import tarfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from servebook.common.errors import ServebookError
from servebook.config.params import HardwareParams
from servebook.hardware import catalog
from servebook.model import tree
from servebook.model.reader import from_config
from servebook.model.shape import ModelShape
from servebook.predictor import kv_groups
from servebook.predictor.fit import on_card

ARCHIVE = Path(__file__).parent / "data" / "published_configs.tar.xz"


@cache
def files() -> dict[str, dict[str, dict[str, Any]]]:
    """{model: {file: its content}}"""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            folder, _, name = member.name.partition("/")
            content = archive.extractfile(member)
            assert content is not None
            out.setdefault(folder, {})[name] = json.load(content)
    return out


@cache
def shape(name: str, **settings: Any) -> ModelShape:
    found = files()[name]
    return from_config(found["config.json"], name=name, sidecar=found.get("hf_quant_config.json"), **settings)


def refused() -> dict[str, str]:
    out = {}
    for name in files():
        try:
            shape(name)
        except ServebookError as error:
            out[name] = str(error)
    return out


def test_nearly_all_are_accepted_and_the_rest_says_why() -> None:
    missing = refused()
    assert len(missing) <= 0.03 * len(files()), missing
    assert all("\n" not in line and line.count(". ") >= 1 for line in missing.values())


def test_parameters_are_those_of_transformers() -> None:
    """Module by module, from the model built on PyTorch's meta device; equal architectures once."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    seen, compared = set(), 0
    for name, found in files().items():
        config = {k: v for k, v in found["config.json"].items() if k not in tree.IRRELEVANT}
        if (key := json.dumps(config, sort_keys=True)) in seen or name in refused():
            continue
        seen.add(key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                real = tree.read_meta(config)
            except tree.NotReadable:
                continue  # of these transformers has no model
        ours = tree.read_blueprint(config)
        tied = {(w.name, w.parameter) for w in real.weights} ^ {(w.name, w.parameter) for w in ours.weights}
        assert not tied, (name, sorted(tied)[:4])
        assert {(w.name, w.parameter, w.shape, w.kind) for w in ours.weights} == {
            (w.name, w.parameter, w.shape, w.kind) for w in real.weights
        }, name
        assert shape(name).parameters == sum(w.size for w in real.weights), name
        compared += 1
    assert compared > 60


@pytest.mark.parametrize(
    ("name", "kv", "states", "context", "active"),
    [  # KV and states from vLLM's own specs of these models' layers; active parameters as their makers say
        ("google--gemma-3-4b-it", 34 * 4 * 256 * 2 * 2, 0, 131_072, None),  # keys left out: its class's defaults
        ("deepseek-ai--DeepSeek-V3", 61 * 576 * 2, 0, 163_840, 37e9),
        ("deepseek-ai--DeepSeek-V3.2", 61 * (576 * 2 + 132), 0, 163_840, 38e9),
        ("Qwen--Qwen3-30B-A3B", 48 * 4 * 128 * 2 * 2, 0, 40_960, 3.3e9),
        ("InferSim--qwen3-next-80B-A3B", 12 * 2 * 256 * 2 * 2, 36 * 2 * (8192 * 3 + 32 * 128 * 128), 262_144, 3.9e9),
        ("Qwen--Qwen3.5-27B", 16 * 4 * 256 * 2 * 2, 48 * (10240 * 3 * 2 + 48 * 128 * 128 * 4), 262_144, None),
        ("XiaomiMiMo--MiMo-V2-Flash", (9 * 4 + 39 * 8) * (192 + 128) * 2, 0, 262_144, 15.4e9),
        ("google--gemma-4-26B-A4B", (25 * 8 * 512 + 5 * 2 * 1024) * 2, 0, 262_144, 3.8e9),
        ("openai--gpt-oss-20b", 24 * 8 * 64 * 2 * 2, 0, 131_072, None),
        ("Qwen--Qwen3-32B-FP8-Static-PerTensor", 64 * 8 * 128 * 2, 0, 40_960, None),  # its KV cache is fp8
        ("ct--kv-only", 32 * 8 * 128 * 2, 0, 131_072, None),
        ("rope--vicuna-7b-v1.5-16k", 32 * 32 * 128 * 2 * 2, 0, 16_384, None),
        ("microsoft--Phi-3.5-mini", 32 * 32 * 96 * 2 * 2, 0, 4_096, None),  # LongRoPE starts at its short context
    ],
)
def test_caches_states_and_contexts(name: str, kv: int, states: int, context: int, active: float | None) -> None:
    s = shape(name)
    assert (s.kv_bytes_per_token, s.state_bytes_per_sequence, s.max_context_tokens) == (kv, states, context)
    assert active is None or s.active_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("name", "parameters", "kv"),
    [  # transformers has no class for them: from the constructors of vLLM's code; parameters as their makers say
        ("XiaomiMiMo--MiMo-7B-Base", 7.62e9, 36 * 8 * 128 * 2 * 2),
        ("openbmb--MiniCPM-2B", 3.01e9, 40 * 36 * 64 * 2 * 2),
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", 49.87e9, 49 * 8 * 128 * 2 * 2),  # 31 of 80 layers do not attend
        ("sgl-project--DeepSeek-V4-Pro-FP8", 1573e9, None),
        ("MiniMaxAI--MiniMax-M3", 426e9, 60 * 4 * 128 * 2 * 2 + 57 * 128 * 2),  # an index beside 57 of 60 layers
        ("microsoft--Phi-3.5-vision", 4.2e9, 32 * 32 * 96 * 2 * 2),
    ],
)
def test_models_that_only_vllm_knows(name: str, parameters: float, kv: int | None) -> None:
    pytest.importorskip("vllm")
    s = shape(name)
    assert s.parameters == pytest.approx(parameters, rel=0.02) and kv in (None, s.kv_bytes_per_token)


def test_windows_follow_the_classes_defaults() -> None:
    windows = {n: shape(n).sliding_window for n in files() if n.startswith("edge--")}
    assert windows == {
        "edge--gemma2-sparse": 4096, "edge--mistral-no-window-key": 4096, "edge--qwen3-no-head_dim": None,
        "edge--sliding_window-0": None,
    }  # fmt: skip


def test_gemma_3_27b_on_an_80_gb_card_is_grouped_as_vllm_groups_it() -> None:
    # vLLM 0.32's own classes: 202,022 tokens, 1.54 requests of 131,072, from 15,595 blocks of ten layers
    kinds = shape("google--gemma-3-27b-it-full").attention
    pool = kv_groups.pool(kinds, 15_595 * 10 * 131_072, in_flight=2 * 2048)
    assert (pool.blocks, pool.tokens(131_072)) == (15_595, 202_022)
    assert pool.concurrency(131_072) == pytest.approx(1.54, abs=0.005)
    # running requests of 2,000 tokens hold 125 blocks and 65 in each of six groups of windows, which free the rest;
    # what is in flight takes 256 blocks of each of the six once
    assert pool.held(2000) == int((15_595 - 6 * 256) / (125 + 6 * 65) * 2000)
    assert pool.tokens(2000) == int(15_595 / (125 + 6 * 126) * 2000)


def test_sparse_latent_caches_depend_on_the_card() -> None:
    # vLLM 0.32: fp8_ds_mla (656 bytes) on Hopper if fp8 is asked for, plain fp8 on the B200, where it is GLM's default
    v32 = "deepseek-ai--DeepSeek-V3.2"

    def latent(name: str, card: str) -> set[float]:
        gpu = catalog.resolve(HardwareParams(gpu=card))
        return {a.token_bytes for a in on_card(shape(name), gpu, 8, 1024).shape.attention if a.kind == "latent"}

    given = {n: [latent(n, card) for card in ("H200", "B200", "RTX-PRO-6000")] for n in ("zai-org--GLM-5.1", v32)}
    assert given == {"zai-org--GLM-5.1": [{1152}, {576}, {656}], v32: [{1152}, {1152}, {656}]}


def test_compressed_caches_are_copied_to_every_rank_and_their_heads_are_not() -> None:
    whole = shape("deepseek-ai--DeepSeek-V4-Flash")
    rank = whole.rank(4)
    assert rank.kv_bytes_per_token == whole.kv_bytes_per_token
    assert {a.heads for a in rank.attention if a.kind in ("sliding", "latent")} == {16}
    assert whole.state_bytes_per_sequence == 4 * (21 * (8 * 2048 + 8 * 512) + 20 * 128 * 1024)
    assert whole.with_fp8_kv().attention == whole.attention
