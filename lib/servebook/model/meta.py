"""A model's weights from PyTorch's meta device, for models whose code blueprint.py cannot run.

Imports torch and transformers, which takes seconds.
"""

from __future__ import annotations

import os
from typing import Any

from .stand_ins import NeedsLibrary, NotReadable


def read(config: dict[str, Any]) -> tuple[Any, list[tuple[str, str, tuple[int, ...], str]], bool]:
    """(configuration, [(module, kind, shape, parameter)], whether the embeddings are tied). Raises NotReadable."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch
        import transformers

        given = {k: v for k, v in config.items() if k != "model_type"}
        made = transformers.AutoConfig.for_model(str(config.get("model_type")), **given)
        with torch.device("meta"):
            try:
                model = transformers.AutoModelForCausalLM.from_config(made)
            except ValueError:
                model = getattr(transformers, str((config.get("architectures") or [""])[0]))(made)
    except ImportError as e:
        raise NeedsLibrary(" ".join(str(e).split())[:120]) from None
    except Exception as e:  # these libraries raise exceptions of any type
        raise NotReadable(f"{type(e).__name__}: {' '.join(str(e).split())[:300]}") from None
    weights, seen = [], set()
    for name, module in model.named_modules():
        for parameter, value in module.named_parameters(recurse=False):
            if id(value) not in seen:
                seen.add(id(value))
                shape = unflattened(module, tuple(value.shape))
                weights.append((name, _kind(torch.nn, module, parameter, shape), shape, parameter))
    return made, weights, bool(getattr(model.config, "tie_word_embeddings", False))


def unflattened(module: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (experts, rows, columns) of a matrix that stacks all experts (DBRX); any other shape unchanged."""
    count = getattr(module, "moe_num_experts", None)
    if len(shape) == 2 and "expert" in type(module).__name__.lower() and isinstance(count, int) and count > 1:
        return count, shape[0] // count, shape[1]
    return shape


def _kind(nn: Any, module: Any, parameter: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and "expert" in type(module).__name__.lower():
        return "experts"
    if parameter == "weight" and isinstance(module, nn.Linear):
        return "linear"
    if parameter == "weight" and type(module).__name__ == "Conv1D":
        return "transposed"
    return "embedding" if parameter == "weight" and isinstance(module, nn.Embedding) else "other"
