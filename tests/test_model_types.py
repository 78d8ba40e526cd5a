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
        ("aria", 18_701_885_824),  # its projector attends to images, its decoder does not
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


def test_a_linear_attention_has_no_kv_cache_beside_its_state() -> None:
    s = shape(
        model_type="kimi_linear", hidden_size=2304, num_hidden_layers=4, num_attention_heads=32, head_dim=72,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=256,
        num_experts_per_token=8, moe_intermediate_size=1024, model_max_length=1 << 20, linear_attn_config={
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    )  # fmt: skip
    # vLLM's kda_state_shape: inputs of the convolution in 16 bits, key by value dimension of 32 heads in fp32
    assert (s.kv_bytes_per_token, s.state_bytes_per_sequence) == (576 * 2, 3 * (12_288 * 3 * 2 + 32 * 128 * 128 * 4))


def test_experts_that_pass_their_input_on_have_no_weights() -> None:
    assert shape(**LONGCAT).parameters == pytest.approx(560e9, rel=0.01)  # as its makers say


KIMI_TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 64, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512,
    "moe_intermediate_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 32, "kv_lora_rank": 16,
}  # fmt: skip


def test_a_decoder_is_known_by_its_architecture_within_a_wrapper_too() -> None:
    kimi: dict[str, Any] = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]}
    known = shape(**kimi, text_config={**KIMI_TEXT, "model_type": "deepseek_v3"})
    assert shape(**kimi, text_config=KIMI_TEXT).parameters == known.parameters


def test_keys_of_the_decoder_at_the_top_of_a_wrapper_count() -> None:
    text = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1000, "num_attention_heads": 4}
    flat = shape(model_type="gemma3", **text)
    assert (flat.vocab, flat.hidden, flat.layers) == (1000, 256, 2)
    assert flat.parameters == shape(model_type="gemma3", text_config=text).parameters


@pytest.mark.parametrize("model_type", ["bloom", "gpt_neox", "falcon", "gptj", "opt", "mpt"])
def test_the_width_of_every_mlp_is_found(model_type: str) -> None:
    s = shape(model_type=model_type)
    assert s.intermediate == 4 * s.hidden


CHATGLM = {
    "architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_qkv_bias": True, "kv_channels": 128,
    "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "hidden_size": 4096,
    "ffn_hidden_size": 13_696, "num_layers": 40, "padded_vocab_size": 151_552, "seq_length": 131_072,
    "rmsnorm": True, "post_layer_norm": True, "original_rope": True, "tie_word_embeddings": False,
}  # fmt: skip
INTERNLM_2 = {
    "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "hidden_size": 6144, "bias": False,
    "num_hidden_layers": 48, "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 16_384,
    "vocab_size": 92_544, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 1e6,
}  # fmt: skip
EXAONE_3 = {
    "architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "activation_function": "silu", "num_layers": 32,
    "hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 102_400, "max_position_embeddings": 32_768, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
INTERNVL = {
    "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5, "select_layer": -1,
    "force_image_size": 448, "ps_version": "v2", "llm_config": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936,
        "intermediate_size": 6144,
    },
    "vision_config": {
        "model_type": "intern_vit_6b", "hidden_size": 1024, "image_size": 448, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "qkv_bias": True,
        "qk_normalization": False, "hidden_act": "gelu", "norm_type": "layer_norm", "layer_norm_eps": 1e-6,
    },
}  # fmt: skip
STEP_3 = {
    "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl", "hidden_size": 7168,
    "text_config": {
        "architectures": ["Step3TextForCausalLM"], "model_type": "step3_text",
        "moe_layers_enum": ",".join(map(str, range(4, 60))),
    },
    "vision_config": {
        "model_type": "step3_vision_encoder", "hidden_size": 1792, "image_size": 728, "intermediate_size": 15_360,
        "num_attention_heads": 16, "num_hidden_layers": 63, "output_hidden_size": 4096, "patch_size": 14,
    },
    "understand_projector_stride": 2, "projector_bias": False,
}  # fmt: skip


MINICPM_V = {
    "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": "2.6", "hidden_size": 3584, "query_num": 64,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944,
    "vocab_size": 151_666, "max_position_embeddings": 32_768, "image_size": 448, "drop_vision_last_layer": False,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "vision_config": {
        "model_type": "siglip", "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
    },
}  # fmt: skip
DEEPSEEK_OCR = {
    "architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
    "projector_config": {"input_dim": 2048, "n_embed": 1280, "projector_type": "linear"},
    "vision_config": {"image_size": 1024, "model_name": "deeplip_b_l"}, "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1280,
        "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10,
        "vocab_size": 129_280, "max_position_embeddings": 8192, "moe_intermediate_size": 896, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "kv_lora_rank": None,
        "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "use_mla": False,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active", "kv"),
    [  # from the constructors of vLLM's code; parameters as their makers say
        (CHATGLM, 9.40e9, 9.40e9, 40 * 2 * 128 * 2 * 2),  # its layers are an encoder's by name
        (INTERNLM_2, 19.86e9, 19.86e9, 48 * 8 * 128 * 2 * 2),  # its head is called output
        (EXAONE_3, 7.82e9, 7.82e9, 32 * 8 * 128 * 2 * 2),  # its own names for layers and norms
        (INTERNVL, 30.85e9, 3.35e9, 48 * 4 * 128 * 2 * 2),  # the decoder's configuration is llm_config
        (MINICPM_V, 8.10e9, 7.61e9, 28 * 4 * 128 * 2 * 2),  # its resampler is moved to a device
        (DEEPSEEK_OCR, 3.31e9, 0.738e9, 12 * 10 * 128 * 2 * 2),  # no latent attention under DeepSeek-V2's type
        (STEP_3, 321e9, 38.8e9, 61 * 256 * 2 * 2),  # queries of low rank beside keys and values
    ],
)  # fmt: skip
def test_models_of_vllms_code(config: dict[str, Any], parameters: float, active: float, kv: int) -> None:
    pytest.importorskip("vllm")
    s = shape(**config)
    assert (s.parameters, s.active_parameters) == (
        pytest.approx(parameters, rel=0.005), pytest.approx(active, rel=0.005)
    )  # fmt: skip
    assert s.kv_bytes_per_token == kv


def test_a_tower_of_another_library_is_said() -> None:
    pytest.importorskip("vllm")
    text = {**KIMI_TEXT, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    vl2 = shape(
        model_type="deepseek_vl_v2", architectures=["DeepseekVLV2ForCausalLM"], language_config=text, tile_tag="2D",
        vision_config={"model_name": "siglip_so400m_patch14_384", "width": 1152},
        projector_config={"projector_type": "downsample_mlp_gelu", "n_embed": 64, "input_dim": 1152},
    )  # fmt: skip
    assert any("timm" in note for note in vl2.notes)


def test_the_last_vllm_that_had_a_model_is_named() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(ServebookError, match=r"vLLM 0\.\d+\.\d+ was the last"):
        shape(model_type="qwen", architectures=["QWenLMHeadModel"])
    bamba = shape(model_type="bamba", architectures=["BambaForCausalLM"])
    assert any("vLLM 0.23.0 was the last" in note for note in bamba.notes)


def test_a_head_that_only_a_class_ties_is_said() -> None:
    open_to_both = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}}
    assert any("own has 0.26 GB more" in note for note in shape(**open_to_both).notes)
    assert not any("LM head" in note for note in shape(**open_to_both, tie_word_embeddings=True).notes)


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


@pytest.mark.parametrize(
    "model_type", ["jetmoe", "xlstm", "ctrl", "moshi", "bert", "gpt-sw3", "reformer", "rwkv", "mllama"]
)
def test_what_is_not_known_is_refused_in_one_line(model_type: str) -> None:
    with pytest.raises(ServebookError) as told:
        shape(model_type=model_type)
    assert "\n" not in str(told.value)


def test_no_weight_depends_on_a_rope_parameter_that_is_missing() -> None:
    s = shape(
        model_type="minicpm3", hidden_size=2560, intermediate_size=6400, num_hidden_layers=62, num_attention_heads=40,
        num_key_value_heads=40, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32,
        vocab_size=73_448, max_position_embeddings=32_768,
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16,
                      "original_max_position_embeddings": 32_768},
    )  # fmt: skip
    assert s.parameters == pytest.approx(4.07e9, rel=0.001)
    # vLLM's MiniCPM3Attention caches keys of 96 and values padded to 96 for all 40 heads, not the latent vector
    assert s.kv_bytes_per_token == 62 * 40 * 2 * 96 * 2


def test_what_its_own_code_refuses_is_not_asked_of_pytorch() -> None:
    with pytest.raises(ServebookError, match="transformers' code cannot build a hunyuan_v1_dense"):
        shape(model_type="hunyuan_v1_dense", head_dim=None)


def test_layer_types_for_another_number_of_layers_are_refused() -> None:
    with pytest.raises(NotReadable, match="layer_types"):
        configuration({"model_type": "zamba2", "num_hidden_layers": 81})
