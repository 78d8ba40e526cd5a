"""Bytes of quantized matrices against those that the formats' own libraries write or allocate."""

from __future__ import annotations

from typing import Any

import pytest
from servebook.common.errors import ServebookError
from servebook.model import checkpoint_formats

ROWS, COLUMNS = 1024, 2048


def stored(given: dict[str, Any]) -> int:
    found = checkpoint_formats.of(given, None, 2, "config.json")
    scheme = found.choose("model.layers.0.mlp.down_proj", "mlp") if found else None
    assert scheme is not None
    return scheme.stored_bytes(ROWS, COLUMNS)


def weights(bits: int, strategy: str, group: int | None = None, kind: str = "int", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": True, **more}


FP8, INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("arguments", "inputs", "container", "written"),
    [  # what compressed-tensors 0.17's ModelCompressor writes of a matrix of 1024 rows and 2048 columns
        (weights(4, "group", 128), None, "pack-quantized", 1_081_360),  # W4A16
        (weights(4, "group", 128, symmetric=False), None, "pack-quantized", 1_089_552),  # W4A16_ASYM
        (weights(4, "group", 32, symmetric=False), None, "pack-quantized", 1_212_432),
        (weights(4, "group", 128, actorder="group"), None, "pack-quantized", 1_089_552),
        (weights(4, "channel"), None, "pack-quantized", 1_050_640),
        (weights(2, "group", 128), None, "pack-quantized", 557_072),
        (weights(3, "group", 128), None, "pack-quantized", 872_464),  # ten to a word
        (weights(6, "group", 128), None, "pack-quantized", 1_712_144),  # five to a word
        (weights(8, "channel", symmetric=False), None, "pack-quantized", 2_100_240),
        (weights(8, "tensor"), None, "pack-quantized", 2_097_170),
        (weights(8, "group", 128), None, "pack-quantized", 2_129_936),  # W8A16
        (weights(4, "group", 128), INT8, "int-quantized", 2_129_920),  # W4A8: a byte each
        (weights(8, "channel"), INT8, "int-quantized", 2_099_200),  # W8A8
        (weights(8, "channel", kind="float"), FP8, "float-quantized", 2_099_200),  # FP8_DYNAMIC
        (weights(8, "block", kind="float", block_structure=[128, 128]), FP8, "float-quantized", 2_097_408),  # FP8_BLOCK
        (weights(8, "group", 128, kind="float"), None, "float-quantized", 2_129_920),
        (weights(8, "group", 32, kind="float", scale_dtype="torch.uint8"), FP8, "mxfp8-quantized", 2_162_688),  # MXFP8
        (weights(4, "group", 32, kind="float", scale_dtype="torch.uint8"), None, "mxfp4-pack-quantized", 1_114_112),
        (weights(4, "tensor_group", 16, kind="float"), {"num_bits": 4, "type": "float"}, "nvfp4-pack-quantized",
         1_179_656),
    ],
)  # fmt: skip
def test_compressed_tensors_writes_as_many(
    arguments: dict[str, Any], inputs: dict[str, Any] | None, container: str, written: int
) -> None:
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": inputs}
    of_all = {"config_groups": {"group_0": group}, "format": container}
    of_the_group = {"config_groups": {"group_0": {**group, "format": container}}, "format": "mixed-precision"}
    for given in (of_all, of_the_group):
        assert stored({"quant_method": "compressed-tensors", **given}) == written


@pytest.mark.parametrize(
    ("given", "allocated"),
    [  # what vLLM 0.32's linear layer of as many rows and columns allocates before it rearranges
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 1_089_536),
        # of a checkpoint without reordering it drops g_idx, four bytes a column
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, 1_089_536 + 4 * COLUMNS),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}, 1_051_136 + 4 * COLUMNS),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 2_097_160),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}, 2_101_248),
    ],
)  # fmt: skip
def test_vllm_allocates_as_many(given: dict[str, Any], allocated: int) -> None:
    assert stored(given) == allocated


def test_lists_in_a_checkpoints_own_words_are_understood() -> None:
    """ModelOpt's MiniMax-M3: other names for blocks and experts, and every matrix of a fused one by itself."""
    layer = "language_model.model.layers.3"
    listed = {
        f"{layer}.block_sparse_moe.experts.0.w1": {"quant_algo": "NVFP4", "group_size": 16},
        f"{layer}.block_sparse_moe.shared_experts.gate_proj": {"quant_algo": "MXFP8"},
        f"{layer}.self_attn.q_proj": {"quant_algo": "MXFP8"},
    }
    given = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    found = checkpoint_formats.of(given, None, 2, "config.json")
    assert found is not None
    ours = "model.language_model.layers.3"
    names = {
        "mlp.experts.0.gate_proj": 4, "mlp.shared_experts.gate_up_proj": 8, "self_attn.qkv_proj": 8,
        "mlp.gate": None,
    }  # fmt: skip
    for name, bits in names.items():
        scheme = found.choose(f"{ours}.{name}", "mlp")
        assert (scheme.bits if scheme else None) == bits, name


@pytest.mark.parametrize(
    ("more", "expert", "dense"),
    [  # DeepSeek-V4: experts beside what its fp8 is; MXFP4 comes with block scales of one byte
        ({}, 2_097_152 + 8 * 16 * 4, 2_097_152 + 8 * 16 * 4),
        ({"expert_dtype": "fp4"}, 1_048_576 + 65_536, 2_097_152 + 8 * 16),
        ({"expert_dtype": "fp4", "moe_quant_algo": "NVFP4"}, 1_048_576 + 131_072 + 8, 2_097_152 + 8 * 16),
    ],
)
def test_experts_of_another_format(more: dict[str, Any], expert: int, dense: int) -> None:
    given = {"quant_method": "fp8", "weight_block_size": [128, 128], **more}
    found = checkpoint_formats.of(given, None, 2, "config.json")
    assert found is not None
    sizes = []
    for role in ("experts", "attention"):
        scheme = found.choose("model.layers.0.x", role)
        assert scheme is not None
        sizes.append(scheme.stored_bytes(ROWS, COLUMNS))
    assert sizes == [expert, dense]


def test_without_a_format_four_bits_beside_eight_bit_integers_take_a_byte() -> None:
    group = {"targets": ["Linear"], "weights": weights(4, "group", 128), "input_activations": INT8}
    # as vLLM 0.32's W4A8Int allocates, and ModelCompressor infers int-quantized
    assert stored({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}) == 2_129_920


def test_torchao_says_it_module_by_module() -> None:
    four = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}
    eight = {
        "_type": "Int8DynamicActivationIntxWeightConfig",
        "_data": {
            "weight_dtype": {"_type": "torch.dtype", "_data": "int8"},
            "weight_granularity": {"_type": "PerGroup", "_data": {"group_size": 32}},
        },
    }
    listed = {
        "_default": four,
        "re:model\\.layers\\.\\d+\\.self_attn\\.q_proj": eight,
        "model.layers.0.mlp.up_proj": None,
    }
    default = {"_type": "FqnToConfig", "_data": {"fqn_to_config": listed}}
    found = checkpoint_formats.of({"quant_method": "torchao", "quant_type": {"default": default}}, None, 2, "x")
    assert found is not None and found.weight_bits == 4
    schemes = [found.choose(f"model.layers.0.{n}", "mlp") for n in ("mlp.down_proj", "self_attn.q_proj", "mlp.up_proj")]
    assert [(s.bits, s.group) if s else None for s in schemes] == [(4, 64), (8, 32), None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"group_size": 64, "bits": 4}, "MLX"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24",
          "config_groups": {"a": {"weights": weights(4, "group", 128)}}}, "marlin-24"),
        ({"quant_method": "exl3", "bits": 4.0}, "exl3"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:[": {}}}, "cannot be read .unterminated character set"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:("]}, "cannot be read .missing"),
    ],
)  # fmt: skip
def test_what_no_server_of_ours_loads_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ServebookError, match=said):
        checkpoint_formats.of(given, None, 2, "config.json")


def test_the_first_form_of_bitsandbytes_is_known() -> None:
    found = checkpoint_formats.of({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, None, 2, "config.json")
    assert found is not None and (found.method, found.weight_bits) == ("bitsandbytes", 4)
