"""How each module of a quantized checkpoint is stored, from its quantization_config and the rules of its format.

Formats: compressed-tensors, ModelOpt (with its sidecar hf_quant_config.json), AWQ, GPTQ, auto-round, fp8, fbgemm,
MXFP4, quark, torchao, bitsandbytes and HQQ. One module: a short function for each format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..common.errors import ServebookError
from .module_names import Names, forms, plain, tail_of
from .quantization import Chooser, Quantization, Scheme


def of(
    given: Mapping[str, Any] | None, sidecar: Mapping[str, Any] | None, element_bytes: int, where: str
) -> Quantization | None:
    """The checkpoint's quantization, from quantization_config or from ModelOpt's hf_quant_config.json; None without
    either. Raises ServebookError for an unknown method or a missing or malformed required value."""
    if given and given.get("quant_method", given.get("quant_algo")):
        method = str(given.get("quant_method") or "modelopt").lower().replace("_", "-")
        method = "modelopt" if method.startswith("modelopt") else method
        if method == "modelopt" and sidecar and not given.get("config_groups"):
            given = sidecar
    elif sidecar:
        method, given = "modelopt", sidecar
    elif given and given.get("config_groups") is not None:
        method = "compressed-tensors"
    elif given and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"  # as its first versions wrote it
    elif given and given.get("bits") and given.get("group_size"):
        raise ServebookError(
            "a quantization of the bits alone, without quant_method, is MLX's", where,
            "Use the checkpoint that it was made from: vLLM does not load MLX's",
        )  # fmt: skip
    elif given:
        raise ServebookError(
            "its quantization_config has no quant_method", where, "Add it, or remove quantization_config"
        )
    else:
        return None
    method = {
        "awq-marlin": "awq",
        "gptq-marlin": "gptq",
        "inc": "auto-round",
        "auto-gptq": "gptq",
        "auto-awq": "awq",
    }.get(method, method)
    if method not in READERS:
        raise ServebookError(
            f"quant_method {method!r} is not supported", where, f"Supported are: {', '.join(sorted(READERS))}"
        )
    try:
        return READERS[method](given or {}, element_bytes)
    except (LookupError, TypeError, ValueError, AttributeError, re.error) as e:
        raise ServebookError(f"quantization_config of {method} cannot be read ({e})", where, "Correct it") from None


def _except(scheme: Scheme | None, kept: Iterable[str] | None, head: bool = False) -> Chooser:
    names = Names(kept)

    def choose(name: str, role: str) -> Scheme | None:
        if (role == "head" and not head) or names.has(name):
            return None
        return scheme

    return choose


def _compressed(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    groups = []
    for group in (given.get("config_groups") or {}).values():
        container = str(group.get("format") or given.get("format") or "")
        scheme = _arguments(group.get("weights"), group.get("input_activations"), element_bytes, container)
        groups.append((scheme, Names(t for t in group.get("targets") or ["Linear"] if t != "Linear"),
                       "Linear" in (group.get("targets") or ["Linear"])))  # fmt: skip
    ignored = Names(given.get("ignore"))

    def choose(name: str, role: str) -> Scheme | None:
        if ignored.has(name):
            return None
        named = next((s for s, names, _ in groups if names.has(name)), None)
        return named or next((s for s, _, every in groups if every), None)

    kv = given.get("kv_cache_scheme")
    bits = next((s.bits for s, _, _ in groups if s), 16)
    return Quantization("compressed-tensors", choose, _kv_bytes(kv), bits)


def _arguments(
    weights: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None, element_bytes: int, container: str
) -> Scheme | None:
    """The storage scheme of compressed-tensors' QuantizationArgs. container: the checkpoint's `format`, which decides
    whether weights of fewer than 8 bits are packed."""
    if not weights:
        return None
    bits, kind = int(weights.get("num_bits") or 8), str(weights.get("type") or "int")
    strategy, group = weights.get("strategy"), weights.get("group_size")
    strategy = strategy or ("tensor" if group is None else "channel" if group == -1 else "group")
    in_bits = int((inputs or {}).get("num_bits") or 16)
    multiplies = None
    if in_bits == 8:
        multiplies = "fp8" if (inputs or {}).get("type") == "float" else "int8"
    elif in_bits == 4 and bits == 4:
        multiplies = "fp4"
    scheme = Scheme(bits, -1, scale_bytes=element_bytes, multiplies=multiplies)
    if strategy == "block":
        rows, columns = weights.get("block_structure") or (128, 128)
        scheme = replace(scheme, block=(int(rows), int(columns)), scale_bytes=element_bytes)
    elif strategy == "channel":
        scheme = replace(scheme, group=0)
    elif strategy in ("group", "tensor_group"):
        scheme = replace(scheme, group=int(group or 128))
        if kind == "float" and bits == 4:
            scheme = replace(scheme, scale_bytes=1, extra_bytes=8 if strategy == "tensor_group" else 0)
        elif kind == "float" and "uint8" in str(weights.get("scale_dtype")):
            scheme = replace(scheme, scale_bytes=1)
    if container == "marlin-24":
        raise ValueError("its 2:4 sparse format marlin-24 is no longer served")
    whole_bytes = in_bits == 8 and multiplies == "int8" and container in ("", "dense")  # vLLM's W4A8Int
    if kind == "int" and (whole_bytes or container in ("int-quantized", "naive-quantized")):
        scheme = replace(scheme, bits=8)  # unpacked: each weight takes a byte
    elif kind == "int" and (bits < 8 or in_bits == 16):
        scheme = replace(scheme, words=True, extra_bytes=16)  # weight_shape
    zeros = kind == "int" and weights.get("symmetric") is False
    return replace(scheme, zeros=zeros, index=weights.get("actorder") in ("group", True))


def _kv_bytes(kv: Any) -> float | None:
    if isinstance(kv, Mapping):
        return {8: 1.0, 4: 0.5625}.get(int(kv.get("num_bits") or 16))
    return {"fp8": 1.0, "nvfp4": 0.5625}.get(str(kv).lower().split("_")[0]) if kv else None


MXFP4 = Scheme(4, 32, scale_bytes=1)
NVFP4 = Scheme(4, 16, scale_bytes=1, extra_bytes=8, multiplies="fp4")
MODELOPT = {
    "fp8": Scheme(8, -1, scale_bytes=4, extra_bytes=4, multiplies="fp8"),
    "fp8-per-channel-per-token": Scheme(8, 0, scale_bytes=4, multiplies="fp8"),
    "fp8-pb-wo": Scheme(8, block=(128, 128), scale_bytes=4),
    "nvfp4": NVFP4,
    "nvfp4-awq": NVFP4,
    "w4a8-nvfp4-fp8": replace(NVFP4, multiplies="fp8"),
    "w4a16-nvfp4": replace(NVFP4, multiplies=None, extra_bytes=4),
    "w4a16-awq": Scheme(4, 128),
    "w4a8-awq": Scheme(4, 128, multiplies="fp8"),
    "mxfp8": Scheme(8, 32, scale_bytes=1, multiplies="fp8"),
    "mxfp4": Scheme(4, 32, scale_bytes=1, multiplies="fp4"),
    "w8a8-sq-per-channel": Scheme(8, 0, scale_bytes=4, multiplies="int8"),
    "w8a16": Scheme(8, 0, scale_bytes=2),
}


def _modelopt_scheme(algorithm: Any, group: Any = None) -> Scheme | None:
    name = str(algorithm or "").lower().replace("_", "-")
    if name in ("", "none", "no-quant"):
        return None
    if name not in MODELOPT:
        raise ValueError(f"quant_algo {algorithm} is not known")
    scheme = MODELOPT[name]
    return replace(scheme, group=int(group)) if group and scheme.group > 0 else scheme


def _modelopt(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    inner = given.get("quantization", given)
    kept = [*(inner.get("exclude_modules") or []), *(inner.get("ignore") or [])]
    kv = _kv_bytes(inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo"))
    algorithm = inner.get("quant_algo")
    layers = inner.get("quantized_layers")
    if layers:
        schemes = {plain(n): _modelopt_scheme(v.get("quant_algo"), v.get("group_size")) for n, v in layers.items()}
        by_tail: dict[str, Scheme | None] = {tail_of(n): s for n, s in schemes.items()} | schemes

        def mixed(name: str, role: str) -> Scheme | None:
            for form in forms(name):
                parts = form.split(".")
                for i in range(len(parts), 0, -1):
                    if (key := ".".join(parts[:i])) in by_tail:
                        return by_tail[key]
            return None

        return Quantization("modelopt", mixed, kv, min((s.bits for s in schemes.values() if s), default=16))
    if inner.get("config_groups") and str(algorithm or "").upper() in ("", "MIXED_PRECISION"):
        found = _compressed(inner, element_bytes)
        return replace(found, method="modelopt", kv_bytes=kv)
    scheme = _modelopt_scheme(algorithm, inner.get("group_size"))
    return Quantization("modelopt", _except(scheme, kept), kv, scheme.bits if scheme else 16)


def _group(given: Mapping[str, Any]) -> int:
    group = given.get("group_size", given.get("q_group_size", 128))
    if group is not None and int(group) < -1:
        raise ValueError(f"group_size is {group}")
    return 0 if group is None or int(group) <= 0 else int(group)


def _bits(given: Mapping[str, Any], *names: str) -> int:
    """Bits of a weight; 4 if no key gives them."""
    return int(next((given[n] for n in names if given.get(n) is not None), 4))


def _awq(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    bits = _bits(given, "bits", "w_bit")
    scheme = Scheme(bits, _group(given), zeros=bool(given.get("zero_point", True)))
    return Quantization("awq", _except(scheme, given.get("modules_to_not_convert")), None, bits)


def _gptq(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    """GPTQ files always contain qzeros and g_idx, used or not. A `dynamic` rule that starts with -: excludes the
    modules that it matches; any other rule changes their bits and group size."""
    bits = _bits(given, "bits")
    plain = Scheme(bits, _group(given), zeros=True, index=True)
    rules = [(re.compile(r[2:] if r[:2] in ("-:", "+:") else r), r, c) for r, c in (given.get("dynamic") or {}).items()]
    kept = _except(plain, given.get("modules_to_not_convert"), head=bool(given.get("lm_head")))

    def choose(name: str, role: str) -> Scheme | None:
        for expression, rule, change in rules:
            if expression.match(name):
                if rule.startswith("-:"):
                    return None
                group = _group({**given, **change})
                return replace(plain, bits=int(change.get("bits") or bits), group=group)
        return kept(name, role)

    return Quantization("gptq", choose, None, bits)


def _auto_round(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    bits = _bits(given, "bits")
    gptq = "gptq" in str(given.get("packing_format", "auto_gptq"))
    scheme = Scheme(bits, _group(given), zeros=True, index=gptq)
    extra = given.get("extra_config") or {}
    kept = [n for n, c in extra.items() if int(c.get("bits", bits)) >= 16]
    named = {n: replace(scheme, bits=int(c["bits"])) for n, c in extra.items() if 0 < int(c.get("bits", 16)) < 16}
    rest = _except(scheme, kept)
    return Quantization("auto-round", lambda n, r: named.get(n) or rest(n, r), None, bits)


def _fp8(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    """DeepSeek-V4 stores its experts in another format: MXFP4 (expert_dtype fp4, all block scales one byte then), or
    what ModelOpt made of them (moe_quant_algo)."""
    block = given.get("weight_block_size")
    kept = [*(given.get("modules_to_not_convert") or []), *(given.get("ignored_layers") or [])]
    if block:
        scheme = Scheme(8, block=(int(block[0]), int(block[1])), scale_bytes=4, multiplies="fp8")
    else:
        static = given.get("activation_scheme") == "static"
        scheme = Scheme(8, -1, scale_bytes=4, extra_bytes=4 if static else 0, multiplies="fp8")
    kv = 1.0 if str(given.get("kv_cache_quant_method") or given.get("kv_cache_dtype") or "").startswith("fp8") else None
    rest = _except(scheme, kept)
    experts = _modelopt_scheme(given.get("moe_quant_algo"))
    if given.get("expert_dtype") == "fp4":
        rest = _except(replace(scheme, scale_bytes=1), kept)
        experts = experts or MXFP4
    if experts is None:
        return Quantization("fp8", rest, kv, 8)
    return Quantization("fp8", lambda n, r: experts if r == "experts" else rest(n, r), kv, experts.bits)


def _fbgemm(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    scheme = Scheme(8, 0, scale_bytes=4, multiplies="fp8")
    return Quantization("fbgemm-fp8", _except(scheme, given.get("modules_to_not_convert")), None, 8)


def _mxfp4(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    kept = _except(MXFP4, given.get("modules_to_not_convert"))
    return Quantization("mxfp4", lambda n, r: kept(n, r) if r == "experts" else None, None, 4)


def _quark(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    whole = given.get("global_quant_config") or {}
    by_layer = [(Names([n]), _quark_scheme(c)) for n, c in (given.get("layer_quant_config") or {}).items()]
    rest = _except(_quark_scheme(whole), given.get("exclude"), head=True)

    def choose(name: str, role: str) -> Scheme | None:
        named = next((s for names, s in by_layer if names.has(name)), None)
        return named if named is not None else rest(name, role)

    outputs = (given.get("layer_quant_config") or {}).get("*k_proj", {}).get("output_tensors") or {}
    kv = given.get("kv_cache_quant_config") or outputs or whole.get("output_tensors")
    kv_bytes = 1.0 if "fp8" in str(kv) else None
    found = _quark_scheme(whole)
    return Quantization("quark", choose, kv_bytes, found.bits if found else 16)


def _quark_scheme(given: Mapping[str, Any]) -> Scheme | None:
    weight, inputs = given.get("weight") or {}, given.get("input_tensors") or {}
    if isinstance(weight, list):
        weight = weight[-1]
    kind = str(weight.get("dtype") or "")
    if not kind:
        return None
    bits = 4 if "4" in kind.split("_")[0] else 8
    multiplies = None
    if inputs or "fp8" in kind:
        multiplies = {"fp8": "fp8", "int8": "int8", "fp4": "fp4"}.get(str(inputs.get("dtype") or kind).split("_")[0])
    granularity = str(weight.get("qscheme") or "per_tensor")
    group = int(weight.get("group_size") or 32) if "group" in granularity else 0 if "channel" in granularity else -1
    scale = 1 if kind.startswith(("fp4", "mx")) and group > 0 else 2 if group > 0 else 4
    return Scheme(bits, group, scale_bytes=scale, multiplies=multiplies)


TORCHAO = {
    "int4weightonly": Scheme(4, 128, scale_bytes=4),
    "int8weightonly": Scheme(8, 0),
    "int8dynamicactivationint8weight": Scheme(8, 0, scale_bytes=4, multiplies="int8"),
    "int8dynamicactivationint4weight": Scheme(4, 32),
    "int8dynamicactivationintx": Scheme(4, 32, multiplies="int8"),
    "intxweightonly": Scheme(4, 32),
    "float8weightonly": Scheme(8, 0, scale_bytes=4),
    "float8dynamicactivationfloat8weight": Scheme(8, -1, scale_bytes=4, multiplies="fp8"),
    "float8dynamicactivationint4weight": Scheme(4, 128, multiplies="fp8"),
    "mxfp8": Scheme(8, 32, scale_bytes=1, multiplies="fp8"),
    "nvfp4": NVFP4,
}


def _torchao(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    """quant_type: a name, one configuration for all matrices, or one per module (`_default` for those not named)."""
    kind = given.get("quant_type")
    default = kind.get("default", kind) if isinstance(kind, Mapping) else {"_type": kind}
    data = default.get("_data") or {}
    by_module = data.get("fqn_to_config") or data.get("module_fqn_to_config")
    kept, head = given.get("modules_to_not_convert"), bool(given.get("include_input_output_embeddings"))
    if not by_module:
        scheme = _torchao_scheme(default)
        return Quantization("torchao", _except(scheme, kept, head), None, scheme.bits if scheme else 16)
    schemes = [(Names([n]), _torchao_scheme(c)) for n, c in by_module.items() if n != "_default"]
    rest = _except(_torchao_scheme(by_module.get("_default")), kept, head)

    def choose(name: str, role: str) -> Scheme | None:
        return next((s for names, s in schemes if names.has(name)), rest(name, role))

    found = [s for s in (*(s for _, s in schemes), rest("", "")) if s]
    return Quantization("torchao", choose, None, min((s.bits for s in found), default=16))


def _torchao_scheme(given: Mapping[str, Any] | None) -> Scheme | None:
    """A torchao configuration as it is written in JSON; None leaves a module as it is."""
    if given is None:
        return None
    kind, data = given.get("_type"), given.get("_data") or {}
    name = str(kind).lower().replace("_", "").removesuffix("config")
    scheme = next((s for n, s in TORCHAO.items() if name.startswith(n)), None)
    if scheme is None:
        raise ValueError(f"quant_type {kind} is not known")
    if "intx" in name:  # its bits and groups are given
        bits = re.search(r"int(\d)", str(data.get("weight_dtype")))
        group = ((data.get("weight_granularity") or {}).get("_data") or {}).get("group_size")
        return replace(scheme, bits=int(bits.group(1)) if bits else 8, group=int(group or 0))
    return replace(scheme, group=int(data["group_size"])) if data.get("group_size") else scheme


def _bitsandbytes(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    kept = given.get("llm_int8_skip_modules") or ["lm_head"]
    if given.get("load_in_4bit") or given.get("_load_in_4bit"):
        # one scale per 64 weights: fp32, or with double quantization one byte plus one fp32 per 256 scales
        double = bool(given.get("bnb_4bit_use_double_quant"))
        scheme = Scheme(4, 64, scale_bytes=1 + 4 / 256 if double else 4, extra_bytes=64 + (1024 + 4 if double else 0))
    else:
        scheme = Scheme(8, 0, scale_bytes=4, multiplies="int8")
    return Quantization("bitsandbytes", _except(scheme, kept), None, scheme.bits)


def _hqq(given: Mapping[str, Any], element_bytes: int) -> Quantization:
    weights = (given.get("quant_config") or {}).get("weight_quant_params") or {}
    bits, group = int(weights.get("nbits") or given.get("nbits") or 4), int(weights.get("group_size") or 64)
    scheme = Scheme(bits, group, scale_bytes=2 * element_bytes)  # scale and zero point, both in the run's dtype
    return Quantization("hqq", _except(scheme, given.get("skip_modules") or ["lm_head"]), None, bits)


READERS: dict[str, Callable[[Mapping[str, Any], int], Quantization]] = {
    "compressed-tensors": _compressed, "modelopt": _modelopt, "awq": _awq, "gptq": _gptq, "auto-round": _auto_round,
    "fp8": _fp8, "fbgemm-fp8": _fbgemm, "mxfp4": _mxfp4, "gpt-oss-mxfp4": _mxfp4, "deepseek-v4-fp8": _fp8,
    "quark": _quark, "torchao": _torchao, "bitsandbytes": _bitsandbytes, "hqq": _hqq,
}  # fmt: skip
