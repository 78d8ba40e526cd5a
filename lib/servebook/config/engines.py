"""Engine parameters: the keys of each engine kind under `engines:`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from .param_types import Count, Port, Positive, Seconds, Share, Strict, Url


class NaiveEngine(Strict):
    """Transformers behind one FIFO lock, batch size 1."""

    continuous_batching: ClassVar[bool] = False
    prefix_caching: ClassVar[bool] = False
    kind: Literal["naive"]
    port: Port | None = None  # default: a free port
    device: Literal["auto", "cpu", "cuda"] = "auto"
    startup_timeout_s: Seconds = 900
    restart_after_failure: bool = True  # restart it once, for the next point; false: skip the rest of the session


class BatchingEngine(Strict):
    """Settings of any engine with continuous batching; the predictor uses them under these names.

    None: the engine's own default, which the predictor assumes to be vLLM's.
    """

    continuous_batching: ClassVar[bool] = True
    kind: str
    port: Port | None = None  # default: a free port
    max_num_batched_tokens: Count | None = None  # tokens in one step, over all requests
    max_num_seqs: Count | None = None
    max_model_len: Count | None = None
    gpu_memory_utilization: Share = 0.9
    cpu_kv_cache_gib: Positive = 1.0  # only if the engine runs on the CPU
    prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    data_parallel_size: Count = 1
    # mixture of experts: whole experts on each GPU instead of a slice of every expert; stored only if given
    enable_expert_parallel: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    env: dict[str, str] = {}
    startup_timeout_s: Seconds = 900
    restart_after_failure: bool = True  # restart it once, for the next point; false: skip the rest of the session


class VllmEngine(BatchingEngine):
    """The vLLM server as a child process."""

    kind: Literal["vllm"]
    # stored only if given: points measured before this setting existed stay valid
    distributed_executor_backend: Annotated[
        Literal["mp", "ray", "uni"] | None, Field(exclude_if=lambda value: value is None)
    ] = None
    extra_args: list[str] = []  # further flags of vLLM's server, as typed


class OpenAIEngine(BatchingEngine):
    """Any other OpenAI-compatible server: one that already runs at `url` and is left running, or one started by
    `command`.

    The predictor assumes the settings of BatchingEngine; the server gets only those that `command` names.
    """

    kind: Literal["openai"]
    url: Url | None = None  # e.g. http://127.0.0.1:8000 (without /v1)
    # argv; {port}, {model} (folder or Hub id), {name} (served model name) and any field of these parameters are filled
    # in
    command: Annotated[list[str], Field(min_length=1)] | None = None
    model: str | None = None  # default: the first model of /v1/models; {model}: the folder or Hub id in command
    chat: bool = False  # use the chat endpoint, with words
    text: bool = False  # send words instead of token ids, for a server that takes no ids
    # for a server that reports no usage: count events, or assume the requested length; the points are suspect
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
