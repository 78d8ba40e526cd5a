"""Engines of a run: what a parameter file may say of each kind under `engines:`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from .param_types import Count, Port, Positive, Seconds, Share, Strict, Url


class NaiveEngine(Strict):
    """Transformers behind one FIFO lock, batch 1."""

    continuous_batching: ClassVar[bool] = False
    prefix_caching: ClassVar[bool] = False
    kind: Literal["naive"]
    port: Port | None = None  # a free one is chosen unless given
    device: Literal["auto", "cpu", "cuda"] = "auto"
    startup_timeout_s: Seconds = 900
    restart_after_failure: bool = True  # once, for the next point; false: what is left of the session is left out


class BatchingEngine(Strict):
    """What any engine with continuous batching is told or assumed to do; the predictor reads it under these names.

    What is None is left to the engine's own default, which the predictor takes to be vLLM's.
    """

    continuous_batching: ClassVar[bool] = True
    kind: str
    port: Port | None = None  # a free one is chosen unless given
    max_num_batched_tokens: Count | None = None  # tokens of one step, over all requests
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    gpu_memory_utilization: Share = 0.9
    cpu_kv_cache_gib: Positive = 1.0  # only where the engine runs on the CPU
    prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    data_parallel_size: Count = 1
    # of a mixture of experts: whole experts on each GPU, not a slice of every one; left out of what a run stores unless
    # given
    enable_expert_parallel: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    env: dict[str, str] = {}
    startup_timeout_s: Seconds = 900
    restart_after_failure: bool = True  # once, for the next point; false: what is left of the session is left out


class VllmEngine(BatchingEngine):
    """The real vLLM server as a child process."""

    kind: Literal["vllm"]
    # left out of what a run stores unless given: points measured before it existed stay valid
    distributed_executor_backend: Annotated[
        Literal["mp", "ray", "uni"] | None, Field(exclude_if=lambda value: value is None)
    ] = None
    extra_args: list[str] = []  # further flags of vLLM's server, as typed


class OpenAIEngine(BatchingEngine):
    """Any other OpenAI-compatible server: one that runs at `url` and is left running, or one that `command` starts.

    The settings of BatchingEngine are what the predictor assumes of it; they reach the server only where `command`
    names them.
    """

    kind: Literal["openai"]
    url: Url | None = None  # e.g. http://127.0.0.1:8000 (without /v1)
    # argv; {port}, {model} (folder or Hub id), {name} (to serve it under), and any field of these parameters
    command: Annotated[list[str], Field(min_length=1)] | None = None
    model: str | None = None  # the first of /v1/models unless given; {model}: the folder or Hub id that command names
    chat: bool = False  # load its chat endpoint, with words
    text: bool = False  # words instead of token ids, for a server that takes none
    # where the server tells no usage: events are counted, or the length asked for is taken; the points are suspect
    count_tokens: Literal["usage", "events", "asked"] = "usage"
    api_key_env: str | None = None  # name of the environment variable that holds the key

    @model_validator(mode="after")
    def _one_source(self) -> OpenAIEngine:
        if bool(self.url) == bool(self.command):
            raise ValueError("give exactly one of url (a server that runs) and command (one to start)")
        if self.command and self.api_key_env:
            raise ValueError("a server that command starts listens on this machine only: leave api_key_env out")
        return self


Engine = Annotated[NaiveEngine | VllmEngine | OpenAIEngine, Field(discriminator="kind")]
