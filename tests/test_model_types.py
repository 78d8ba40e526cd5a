"""Kinds of models beyond the published files: right as transformers counts them, or refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
from servebook.common.errors import ServebookError
from servebook.model import tree
from servebook.model.config_classes import configuration
from servebook.model.reader import from_config
from servebook.model.shape import ModelShape
from servebook.model.stand_ins import NotReadable


@pytest.fixture(autouse=True)
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read here is read from the models' code: PyTorch's meta device would take seconds."""

    def asked(config: dict[str, Any]) -> tree.Tree:
        raise tree.NotReadable("PyTorch would be asked")

    monkeypatch.setattr(tree, "read_meta", asked)


def shape(**config: Any) -> ModelShape:
    return from_config(config, name=str(config["model_type"]))


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [  # its class's defaults; parameters of the model that transformers 5.19 builds on PyTorch's meta device
        ("zamba", 7_232_490_496),  # blocks tied by an expression
        ("zamba2", 2_481_848_336),  # blocks tied in a cycle
        ("kosmos-2.5", 1_374_646_272),  # a model within the model ties its own embeddings
        ("apertus", 6_979_596_352),  # an activation with parameters
        ("diffllama", 1_204_885_504),  # parameters of torch.normal
        ("falcon_h1", 8_514_961_408),
        ("olmo_hybrid", 7_430_870_688),
        ("glmga", 10_292_777_472),  # a class of another model's module
        ("gemma3n_text", 6_835_235_568),
        ("paligemma", 2_910_390_528),
    ],
)
def test_every_kind_of_module_is_counted(model_type: str, parameters: int) -> None:
    assert shape(model_type=model_type).parameters == parameters


HUNYUAN = {
    "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64, "vocab_size": 128_167,
    "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "moe_intermediate_size": [3072] * 32,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True,
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768, "vocab_size": 100_352,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500_000},
    "ffn_config": {"ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
LONGCAT = {
    "model_type": "longcat_flash", "hidden_size": 6144, "ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048,
    "num_layers": 28, "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 512, "zero_expert_num": 256, "moe_topk": 12,
    "vocab_size": 131_072, "max_position_embeddings": 131_072,
}  # fmt: skip
GEMMA_3N = {
    "model_type": "gemma3n",
    "text_config": {
        "model_type": "gemma3n_text", "hidden_size": 2048, "intermediate_size": [16_384] * 35, "num_hidden_layers": 35,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 15,
        "sliding_window": 512, "layer_types": ["sliding_attention"] * 35,
    },
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax", "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32,
    "num_experts_per_tok": 2, "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "active", "kv", "states"),
    [  # active parameters as the makers say
        (HUNYUAN, 13e9, 32 * 8 * 128 * 2 * 2, 0),  # experts a token as a list, one a layer
        (DBRX, 36e9, 40 * 8 * 128 * 2 * 2, 0),  # the experts' matrices are one
        (LONGCAT, 27e9, 2 * 28 * 576 * 2, 0),  # two attentions a layer; a third of the choices cost nothing
        (GEMMA_3N, 6.9e9, 20 * 2 * 256 * 2 * 2, 0),  # 15 layers share caches; its tower needs a library
        (MINIMAX, 46e9, 10 * 8 * 128 * 2 * 2, 70 * 64 * 128 * 128 * 2),  # linear attention without a convolution
    ],
)  # fmt: skip
def test_experts_caches_and_states(config: dict[str, Any], active: float, kv: int, states: int) -> None:
    s = shape(**config)
    assert s.active_parameters == pytest.approx(active, rel=0.05)
    assert (s.kv_bytes_per_token, s.state_bytes_per_sequence) == (kv, states)


def test_what_cannot_be_built_here_is_said() -> None:
    assert any("timm" in note and "gemma3n_text" in note for note in shape(**GEMMA_3N).notes)
    omni = shape(model_type="qwen3_omni_moe", thinker_config={})
    assert any("thinker" in note for note in omni.notes)


def test_a_context_that_nothing_names_is_vllms() -> None:
    mamba = shape(model_type="mamba2")
    assert mamba.max_context_tokens == 2048 and any("2,048" in note for note in mamba.notes)
    cohere = shape(model_type="cohere", max_position_embeddings=8192, model_max_length=131_072)
    assert cohere.max_context_tokens == 131_072


def test_a_latent_head_may_have_no_dimension_of_its_own() -> None:
    assert (
        shape(model_type="glm5_next", head_dim=0, kv_lora_rank=512).parameters
        == shape(model_type="glm5_next").parameters
    )


@pytest.mark.parametrize("model_type", ["jetmoe", "xlstm", "ctrl", "moshi", "bert", "gpt-sw3", "reformer"])
def test_what_is_not_known_is_refused_in_one_line(model_type: str) -> None:
    with pytest.raises(ServebookError) as told:
        shape(model_type=model_type)
    assert "\n" not in str(told.value)


def test_layer_types_for_another_number_of_layers_are_refused() -> None:
    with pytest.raises(NotReadable, match="layer_types"):
        configuration({"model_type": "zamba2", "num_hidden_layers": 81})
