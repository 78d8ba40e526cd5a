from __future__ import annotations

import json
from pathlib import Path

import linear_weights
import pytest
from servebook.common.errors import ServebookError
from servebook.config.params import ModelParams
from servebook.model.reader import PACKAGED, from_config, materialize, packaged, read_shape

BASE = Path(".")


def shape(name: str, **kw):
    return read_shape(ModelParams(config=name, weights="dummy", **kw), BASE)


def limited(s) -> int:
    """Layers with an attention limit."""
    return sum(a.layers for a in s.attention if a.limit)


def config(name: str, **changes) -> dict:
    c = json.loads((PACKAGED / f"{name}.json").read_text()) | changes
    return {k: v for k, v in c.items() if v is not ...}


# Totals as the model cards and the checkpoints' indices give them.
PUBLISHED_PARAMETERS = {
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-2-9b": 9_241_705_984,
}


@pytest.mark.parametrize(("name", "total"), PUBLISHED_PARAMETERS.items())
def test_parameters_equal_the_published_totals(name: str, total: int):
    assert shape(name).parameters == total


def test_every_packaged_config_is_read():
    assert set(packaged()) >= set(PUBLISHED_PARAMETERS) | {"tiny-qwen2"}
    assert all(shape(name).parameters > 0 for name in packaged())


def test_the_posts_bytes():
    qwen25, qwen3 = shape("qwen2.5-7b"), shape("qwen3-8b")
    assert qwen25.kv_bytes_per_token == 57_344
    assert qwen3.kv_bytes_per_token == 147_456
    assert qwen25.decode_weight_bytes == 2 * (7_615_616_512 - 152_064 * 3_584)
    assert qwen25.decode_weight_bytes == pytest.approx(14.14e9, rel=1e-3)
    assert qwen3.weight_bytes == 2 * qwen3.parameters == pytest.approx(16.38e9, rel=1e-3)


def test_the_posts_flops():
    s = shape("qwen2.5-7b")
    assert s.linear_flops_per_token == 13_050_576_896  # post 2 prints this number
    assert s.lm_head_flops == 2 * 3584 * 152_064
    assert s.attention_flops_per_context_token == 28 * 28 * 512 == 401_408
    assert s.prefill_flops(512) == pytest.approx(6.74e12, rel=1e-3)
    assert s.prefill_flops(8192) == pytest.approx(1.20e14, rel=5e-3)
    assert s.decode_flops(52, 8192) == pytest.approx(8.99e11, rel=0.01)


def test_gqa_mqa_mha_scale_kv_alone():
    mha = from_config(config("llama-3.1-8b", num_key_value_heads=...), name="mha")
    gqa = from_config(config("llama-3.1-8b"), name="gqa")
    mqa = from_config(config("llama-3.1-8b", num_key_value_heads=1), name="mqa")
    assert (mha.kv_bytes_per_token, mqa.kv_bytes_per_token) == (4 * gqa.kv_bytes_per_token, gqa.kv_bytes_per_token // 8)
    assert mha.attention_flops_per_context_token == mqa.attention_flops_per_context_token
    assert mha.parameters - gqa.parameters == 32 * 2 * 4096 * (4096 - 1024)


def test_tied_table_is_read_as_the_lm_head_but_held_once():
    s = shape("qwen2.5-0.5b")
    assert s.tied_embeddings and s.decode_weight_bytes == s.weight_bytes == 2 * s.parameters
    untied = from_config(config("qwen2.5-0.5b", tie_word_embeddings=False), name="untied")
    assert untied.decode_weight_bytes == s.decode_weight_bytes
    assert untied.weight_bytes - s.weight_bytes == 2 * 151_936 * 896


def test_gemma_is_tied_unless_it_says_otherwise():
    assert shape("gemma-2-9b").tied_embeddings
    assert shape("gemma-2-9b").kv_bytes_per_token == 42 * 8 * 256 * 2 * 2  # head_dim 256, not 3584/16


def test_head_dim_is_not_hidden_over_heads():
    narrow = from_config(config("qwen3-8b", hidden_size=2560, num_hidden_layers=36), name="qwen3-4b-like")
    assert narrow.head_dim == 128 != 2560 // 32
    assert narrow.attention_flops_per_context_token == 4 * 36 * 32 * 128


def test_biases_and_qk_norms_are_counted():
    plain = from_config(config("llama-3.1-8b"), name="plain")
    biased = from_config(config("llama-3.1-8b", attention_bias=True, mlp_bias=True), name="biased")
    per_layer = 4096 + 2 * 1024 + 4096 + 2 * 14_336 + 4096
    assert biased.parameters - plain.parameters == 32 * per_layer
    qwen3 = shape("qwen3-8b")
    assert linear_weights.of_norms_and_biases(qwen3) == 36 * (2 * 4096 + 2 * 128) + 4096


def test_sliding_window_cuts_half_of_gemmas_layers():
    s = shape("gemma-2-9b")
    assert (s.sliding_window, limited(s)) == (4096, 21)
    assert s.kv_read_bytes(4096) == 4096 * s.kv_bytes_per_token
    assert s.kv_read_bytes(8192) == (21 * 8192 + 21 * 4096) * s.kv_bytes_per_token // 42
    per_layer = s.attention_flops_per_context_token // 42
    slow = sum(21 * i + 21 * min(i, 4096) for i in range(1, 8193))
    assert s.attention_flops(0, 8192) == per_layer * slow
    assert s.attention_flops(0, 5000) == s.attention_flops(0, 3000) + s.attention_flops(3000, 2000)
    assert s.attention_flops(6000, 1) == int(s.attention_flops_per_context_token * s.attended(6001))


def test_qwen_window_is_off_unless_used():
    assert shape("qwen2.5-7b").sliding_window is None
    used = from_config(
        config("qwen2.5-7b", use_sliding_window=True, max_window_layers=20, sliding_window=1024), name="x"
    )
    assert (used.sliding_window, limited(used)) == (1024, 8)
    assert limited(from_config(config("mistral-7b-v0.3", sliding_window=4096), name="v0.1")) == 32


def test_quantization_touches_the_linear_matrices_alone():
    full, fp8, int4 = (
        shape("qwen2.5-7b"),
        shape("qwen2.5-7b", quantization="fp8"),
        shape("qwen2.5-7b", quantization="int4"),
    )
    linear = linear_weights.parameters(full)
    # a scale of four bytes a matrix, of two a group of 128
    assert full.decode_weight_bytes - fp8.decode_weight_bytes == linear - 4 * 7 * 28
    assert linear_weights.stored_bytes(int4) == linear // 2 + linear // 128 * 2
    assert fp8.lm_head_bytes == int4.lm_head_bytes == full.lm_head_bytes
    assert (fp8.compute_dtype, int4.compute_dtype) == ("fp8", "bfloat16")
    assert fp8.parameters == full.parameters
    assert shape("qwen2.5-7b", kv_cache_dtype="fp8").kv_bytes_per_token == 57_344 // 2
    assert shape("qwen2.5-7b", dtype="float32").weight_bytes == 2 * full.weight_bytes


@pytest.mark.parametrize(
    ("given", "bits", "bits_a_weight", "compute"),
    [
        # scales in 16 bits, zero points in 4, both of 128 weights
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4, 4 + (16 + 4) / 128, "bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 8 + 32 / 128**2, "fp8"),
        ({"quant_method": "fp8"}, 8, 8, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, 4 + 32 / 64, "bfloat16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4, 4 + 8 / 16, "fp4"),
    ],
)
def test_checkpoint_that_is_already_quantized(given: dict, bits: int, bits_a_weight: float, compute: str):
    s = from_config(config("qwen3-8b", quantization_config=given), name="q")
    assert (s.weight_bits, s.compute_dtype) == (bits, compute) and s.lm_head_bytes == 2 * s.lm_head_parameters
    assert linear_weights.stored_bytes(s) == pytest.approx(linear_weights.parameters(s) * bits_a_weight / 8, rel=1e-4)


def test_compressed_tensors_with_fp8_kv():
    scheme = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
    given = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    s = from_config(config("llama-3.1-8b", quantization_config=given | {"kv_cache_scheme": {"num_bits": 8}}), name="q")
    assert (s.weight_bits, s.compute_dtype, s.kv_bytes_per_element) == (8, "fp8", 1)
    assert s.lm_head_bytes == 2 * s.lm_head_parameters
    whole = from_config(config("llama-3.1-8b", quantization_config=given | {"ignore": []}), name="q")
    assert whole.lm_head_bytes == pytest.approx(s.lm_head_parameters, rel=1e-6)


def test_multi_modal_nesting():
    nested = {"architectures": ["X"], "model_type": "some_vl", "text_config": config("qwen3-8b")}
    s = from_config(nested, name="vl")
    assert s.parameters == PUBLISHED_PARAMETERS["qwen3-8b"] and "some_vl" in s.notes[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "152064"}, "vocab_size is '152064'"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"model_type": "novel_arch", "architectures": ["NovelForCausalLM"]}, "not supported"),
        ({"model_type": "t5"}, "no language model of type 't5'"),
        ({"is_encoder_decoder": True}, "Use a decoder-only"),
        ({"model_type": 7, "architectures": []}, "model_type is 7"),
        ({"architectures": "Qwen2ForCausalLM"}, "not a list of names"),
        ({"hidden_size": 10**12}, "more than any model has"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "context length cannot be told"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor is -2"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"tie_word_embeddings": "no"}, "not true or false"),
        ({"use_sliding_window": True, "sliding_window": "4k"}, "not a number"),
        ({"layer_types": ["novel"] * 28}, "layer_types has 'novel'"),
        ({"quantization_config": {"bits": 4}}, "no quant_method"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 0}}, "0 bits a weight"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": -5}}, "group_size is -5"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, "blocks of 0"),
        (
            {"model_type": "gemma3", "hidden_size": None, "num_hidden_layers": None, "vision_config": {"depth": 1}},
            "nothing about the decoder",
        ),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config is"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9}, "routed to 9 of 8 experts"),
        ({"quantization_config": {"quant_method": "novel"}}, "'novel' is not supported"),
        ({"quantization_config": "fp8"}, "not an object"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_file(changes: dict, said: str):
    with pytest.raises(ServebookError) as e:
        from_config(config("qwen2.5-7b", **changes), name="m", source="models/m/config.json")
    assert said in str(e.value) and "models/m/config.json" in str(e.value) and "\n" not in str(e.value)


def test_missing_packaged_name_folder_file_and_json(tmp_path: Path):
    with pytest.raises(ServebookError, match=r"Did you mean qwen2\.5-7b"):
        read_shape(ModelParams(config="qwen25-7b", weights="dummy"), BASE)
    with pytest.raises(ServebookError, match="no such model folder"):
        read_shape(ModelParams(path="nowhere"), tmp_path)
    (tmp_path / "m").mkdir()
    with pytest.raises(ServebookError, match=r"no config\.json"):
        read_shape(ModelParams(path="m"), tmp_path)
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ServebookError, match="not valid JSON"):
        read_shape(ModelParams(path="m"), tmp_path)


def test_materialized_folder_is_written_once_and_its_tokenizer_is_whole(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    params = ModelParams(config="tiny-qwen2", weights="dummy")
    folder = Path(materialize(params, BASE, tmp_path))
    assert json.loads((folder / "config.json").read_text()) == config("tiny-qwen2")
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert materialize(params, BASE, tmp_path) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["tiny-qwen2"]

    t = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert t.get_vocab_size() == 2048
    assert all(t.decode([i]) for i in range(2048))
    ids = [97 + i for i in range(0, 1951, 13)]  # words; single characters may merge with what precedes them
    assert t.encode(t.decode(ids)).ids == ids
    assert t.decode(t.encode("Plain text, too.").ids) == "Plain text, too."


def test_half_written_folder_is_replaced(tmp_path: Path):
    (tmp_path / "tiny-qwen2").mkdir()
    (tmp_path / "tiny-qwen2" / "config.json").write_text("{}")
    folder = Path(materialize(ModelParams(config="tiny-qwen2", weights="dummy"), BASE, tmp_path))
    assert (folder / "tokenizer.json").is_file() and json.loads((folder / "config.json").read_text()) != {}


def test_materialize_leaves_hub_ids_and_real_folders_alone(tmp_path: Path):
    assert materialize(ModelParams(hub="a/b"), tmp_path, tmp_path / "out") == "a/b"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config("tiny-qwen2")))
    assert materialize(ModelParams(path="mine"), tmp_path, tmp_path / "out") == tmp_path / "mine"
    assert not (tmp_path / "out").exists()
    assert (
        materialize(ModelParams(path="mine", weights="dummy"), tmp_path, tmp_path / "out") == tmp_path / "out" / "mine"
    )


@pytest.mark.parametrize("name", sorted([*PUBLISHED_PARAMETERS, "tiny-qwen2"]))
def test_transformers_counts_the_same_parameters(name: str, tmp_path: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = materialize(ModelParams(config=name, weights="dummy"), BASE, tmp_path)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    except (ImportError, OSError, RuntimeError) as e:  # a torchvision or torchaudio that does not fit this torch
        pytest.skip(f"Transformers does not import here: {e}")
    assert sum(p.numel() for p in model.parameters()) == shape(name).parameters
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == shape(name).vocab
    ids = [100, 500, 1000, 2000]
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
