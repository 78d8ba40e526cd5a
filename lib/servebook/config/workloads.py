"""The requests of a load: lengths, shared prompt parts, conversations, or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from . import lengths, traces
from .param_types import Count, Positive, Requests, Strict, unfit

MEAN_OF = 4096  # number of requests from which a workload's mean lengths are computed


def _length(value: int | str) -> int | str:
    try:
        lengths.parse(str(value))
    except ValueError as error:
        raise unfit(str(error), f"Valid: {lengths.SYNTAX}") from None
    return value


LengthParams = Annotated[int | str, AfterValidator(_length)]
TraceForm = Literal[
    "servebook", "azure", "burstgpt", "mooncake", "timed", "sharegpt", "vllm_custom", "inference_perf"
]  # trace_forms.FORMATS
OneOf = Field(default=None, exclude_if=lambda value: value is None)


class SharedPrefix(Strict):
    """Leading tokens shared by the prompts of a group; prompts are assigned to groups in turn."""

    tokens: Count
    groups: Count = 1


class Workload(Strict):
    """Requests by their lengths (prompt_tokens includes the shared prefix), or those of a trace.

    Lengths are counts or text: 100:1000 (uniform), normal:MEAN,SD[,LOW,HIGH] or lognormal:…. unique_prompts: number of
    different prompts, sent in turn. turns: requests per conversation, each with the whole conversation in its prompt;
    prompt_tokens is what a turn adds.
    """

    prompt_tokens: LengthParams | None = OneOf
    output_tokens: LengthParams | None = OneOf
    shared_prefix: SharedPrefix | None = OneOf
    unique_prompts: Count | None = OneOf
    turns: Count = 1
    trace: str | None = OneOf  # a file, relative to the parameter file
    format: TraceForm | None = OneOf  # of a trace whose lines do not give it
    requests: Annotated[Requests, Field(gt=0)] | None = OneOf  # only the first N requests of the trace
    tokens_per_word: Positive = 1.3  # of a trace with texts and no counts
    _base: Path = PrivateAttr(default=Path())
    _trace: traces.Trace | None = PrivateAttr(default=None)
    _laws: tuple[lengths.Length, lengths.Length] | None = PrivateAttr(default=None)

    @classmethod
    def of(
        cls, prompts: lengths.Length, outputs: lengths.Length, *, shared_tokens: int = 0, turns: int = 1
    ) -> Workload:
        """A workload of plain lengths; shared_tokens: leading tokens shared by all prompts, at most the prompt."""
        prefix = SharedPrefix(tokens=shared_tokens) if shared_tokens else None
        workload = cls.model_construct(prompt_tokens=1, output_tokens=1, shared_prefix=prefix, turns=turns)
        workload._laws = prompts, outputs
        return workload

    @classmethod
    def of_rows(cls, rows: traces.Trace) -> Workload:
        """A workload of a trace given as rows."""
        workload = cls.model_construct(trace="rows")
        workload._trace = rows
        return workload

    @model_validator(mode="after")
    def _one_source(self) -> Workload:
        if self.trace is None:
            if self.prompt_tokens is None or self.output_tokens is None:
                raise unfit("no prompt_tokens and output_tokens, and no trace", "Give both lengths, or a trace")
            if self.format or self.requests:
                raise unfit("format and requests say something of a trace only", "Leave them out, or give a trace")
            if self.shared_prefix and self.shared_prefix.tokens >= lengths.shortest(self.prompts):
                raise unfit(
                    f"shared_prefix takes {self.shared_prefix.tokens} tokens, the shortest prompt has "
                    f"{lengths.shortest(self.prompts)}", "Prompt tokens include the shared prefix: make them longer"
                )  # fmt: skip
            if self.turns > 1 and self.unique_prompts:
                raise unfit("a conversation's prompts are its own", "Leave out unique_prompts or turns")
            return self
        given = [k for k in ("prompt_tokens", "output_tokens", "shared_prefix", "unique_prompts") if getattr(self, k)]
        if given or self.turns > 1:
            raise unfit(
                f"the trace already gives {', '.join(given) or 'turns'}", "Leave that out, or leave out the trace"
            )
        return self

    def __eq__(self, other: object) -> bool:
        """Compares the given settings, not the folder of the trace."""
        return isinstance(other, Workload) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    @property
    def prompts(self) -> lengths.Length:
        """The distribution of prompt lengths."""
        return self._laws[0] if self._laws else lengths.parse(str(self.prompt_tokens))

    @property
    def outputs(self) -> lengths.Length:
        """The distribution of output lengths."""
        return self._laws[1] if self._laws else lengths.parse(str(self.output_tokens))

    def at(self, base: Path) -> Workload:
        """The same workload with its trace in the given folder."""
        self._base = base
        return self

    def rows(self) -> traces.Trace:
        """The trace, read once. Raises ServebookError for an invalid file or line."""
        assert self.trace is not None
        if self._trace is None:
            read = traces.read(self._base / self.trace, self.format, tokens_per_word=self.tokens_per_word)
            self._trace = read.first(self.requests) if self.requests else read
        return self._trace

    def first(self, count: int) -> Workload:
        """The workload with only the first requests of its trace."""
        if count >= len(self.rows()):
            return self
        shorter = self.model_copy(update={"requests": count})
        shorter._trace = self.rows().first(count)
        return shorter

    def identity(self) -> dict[str, Any]:
        """What determines the requests, as JSON: the settings, and a trace's content."""
        given = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude={"trace"})
        return given | ({"trace_sha256": self.rows().sha256} if self.trace else {})

    @property
    def varies(self) -> bool:
        """Whether requests differ in length."""
        return self.trace is not None or self.turns > 1 or not all(
            isinstance(length, int) for length in (self.prompts, self.outputs)
        )  # fmt: skip

    def mean_tokens(self) -> tuple[int, int]:
        """Mean (prompt, output) tokens of a request, whole numbers of at least 1."""
        if self.trace is not None:
            rows = self.rows()
            return max(1, round(float(rows.prompt_tokens.mean()))), max(1, round(float(rows.output_tokens.mean())))
        prompt, output = lengths.mean(self.prompts, MEAN_OF), lengths.mean(self.outputs, MEAN_OF)
        prompt += (self.turns - 1) / 2 * (prompt + output)  # the conversation so far, averaged over its turns
        return max(1, round(prompt)), max(1, round(output))

    def longest_tokens(self) -> tuple[int, int]:
        """(prompt, output) tokens of the request that needs the longest context; for distributions their upper
        bounds."""
        if self.trace is not None:
            rows = self.rows()
            at = int((rows.prompt_tokens + rows.output_tokens).argmax())
            return int(rows.prompt_tokens[at]), int(rows.output_tokens[at])
        prompt, output = lengths.longest(self.prompts), lengths.longest(self.outputs)
        return prompt + (self.turns - 1) * (prompt + output), output

    @property
    def repeats(self) -> bool:
        """Whether prompts begin with earlier sent tokens, so that cache hits are expected."""
        if self.trace is not None:
            return self.rows().shares
        return bool(self.shared_prefix or self.unique_prompts or self.turns > 1)
