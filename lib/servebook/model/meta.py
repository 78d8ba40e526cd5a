"""A model's weights from PyTorch's meta device, for code that blueprint cannot read.

Imports torch and transformers, which takes seconds.
"""

from __future__ import annotations

import os
from typing import Any

from .stand_ins import NotReadable


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
    except Exception as e:  # these libraries raise anything
        raise NotReadable(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else e}") from None
    weights, seen = [], set()
    for name, module in model.named_modules():
        for parameter, value in module.named_parameters(recurse=False):
            if id(value) not in seen:
                seen.add(id(value))
                weights.append((name, _kind(torch.nn, module, parameter, value), tuple(value.shape), parameter))
    return made, weights, bool(getattr(model.config, "tie_word_embeddings", False))


def _kind(nn: Any, module: Any, parameter: str, value: Any) -> str:
    if value.dim() == 3 and "expert" in type(module).__name__.lower():
        return "experts"
    if parameter == "weight" and isinstance(module, nn.Linear):
        return "linear"
    if parameter == "weight" and type(module).__name__ == "Conv1D":
        return "transposed"
    return "embedding" if parameter == "weight" and isinstance(module, nn.Embedding) else "other"
