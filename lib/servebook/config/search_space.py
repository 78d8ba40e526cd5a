"""What `servebook choose` searches: cards with their prices, how many, and the settings that it may change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .param_types import Count, Once, Positive, Share, Strict, unfit

MAX_GPUS = 16
CONFIDENCE = 0.8
Degrees = Annotated[list[Count], Field(min_length=1), Once]


class SearchSpace(Strict):
    """The `choose:` section of a parameter file. Everything has a default.

    gpus: price per hour of a card, by its catalog name; null: the public list price. Default: all cards of the catalog
    with a list price. confidence: the least probability of meeting the service level. quantization, kv_cache_dtype:
    alternatives to the run's own; an 8-bit format changes the model's answers, which servebook does not measure.
    """

    gpus: dict[str, Positive | None] = {}
    max_gpus: Count = MAX_GPUS  # over all replicas
    gpus_per_machine: Count = 8  # most GPUs of one replica
    confidence: Annotated[Share, Field(lt=1)] = CONFIDENCE
    tensor_parallel_size: Degrees = [1, 2, 4, 8]
    pipeline_parallel_size: Degrees = [1, 2]
    data_parallel_size: Degrees = [1, 2, 4, 8]  # for a mixture of experts; a dense model uses more replicas instead
    quantization: Annotated[list[Literal["none", "fp8"]], Field(min_length=1), Once] = ["none", "fp8"]
    kv_cache_dtype: Annotated[list[Literal["auto", "fp8"]], Field(min_length=1), Once] = ["auto", "fp8"]
    max_num_batched_tokens: Degrees = [2048, 8192, 16384]
    max_num_seqs: Degrees = [64, 256, 1024]
    prefix_caching: Annotated[list[bool], Field(min_length=1), Once] = [True, False]

    @model_validator(mode="after")
    def _room(self) -> SearchSpace:
        least = min(self.tensor_parallel_size) * min(self.pipeline_parallel_size)
        if least > min(self.max_gpus, self.gpus_per_machine):
            raise unfit(
                f"the smallest replica takes {least} GPUs, more than there may be",
                "Raise max_gpus or lower the degrees",
            )
        if max(self.max_num_batched_tokens) < min(self.max_num_seqs):
            raise unfit(
                f"a budget of {max(self.max_num_batched_tokens)} tokens is less than one for each of "
                f"{min(self.max_num_seqs)} sequences",
                "Raise max_num_batched_tokens or lower max_num_seqs",
            )
        return self
