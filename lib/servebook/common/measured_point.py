"""A measured point: its load, its figures, its verdict. Each field is a column of points.csv.

In a field's annotation the second part is the unit and the third the meaning; docs/points.md is generated from them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args, get_type_hints

from .reasons import Reason, Verdict, stored_reason

Number = float | None
# The predicted and scored metrics of a point: mean latencies and rates
Metric = Literal["ttft_s", "tpot_s", "e2e_s", "output_tok_per_s", "decode_tok_per_s", "request_rate_per_s"]
METRICS: tuple[Metric, ...] = get_args(Metric)
PointKey = tuple[str, str, str]  # (sweep, engine, point_id): identifies a point within a run
POINT_KEY = ("sweep", "engine", "point")  # the columns of a PointKey


class Turn(TypedDict):
    """One turn of a point's conversations, counted from 0."""

    turn: int
    requests: int
    prompt_tokens_mean: float | None
    ttft_mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One measured point. None: the figure was not reported or does not apply to this kind of load."""

    sweep: Annotated[str, "", "the sweep that the point belongs to; calibration for the C = 1 points"]
    engine: Annotated[str, "", "the engine's name in the parameters"]
    kind: Annotated[str | None, "", "the sweep's kind, or calibration"] = None
    point_id: Annotated[str, "", "the point's name in its sweep (column `point`)"]
    concurrency: Annotated[int | None, "requests", "clients of a closed loop; None in an open loop"] = None
    rate_per_s: Annotated[Number, "1/s", "requested rate of an open loop"] = None
    prompt_tokens: Annotated[int, "tokens", "requested prompt length"]
    output_tokens: Annotated[int, "tokens", "requested output length"]
    requests: Annotated[int | None, "requests", "answered requests of the measured window"] = None
    failures: Annotated[int | None, "requests", "failed requests of the measured window"] = None
    seconds: Annotated[Number, "s", "length of the measured window"] = None
    stop_reason: Annotated[str | None, "", "what ended the point"] = None
    ttft_mean_s: Annotated[Number, "s", "time to first token, mean"] = None
    ttft_p50_s: Annotated[Number, "s", "time to first token, median"] = None
    ttft_p90_s: Annotated[Number, "s", "time to first token, 90th percentile"] = None
    ttft_p99_s: Annotated[Number, "s", "time to first token, 99th percentile"] = None
    ttft_ci_low_s: Annotated[Number, "s", "95 % interval of the mean TTFT, lower end"] = None
    ttft_ci_high_s: Annotated[Number, "s", "95 % interval of the mean TTFT, upper end"] = None
    tpot_mean_s: Annotated[Number, "s", "time per output token after the first, mean over requests"] = None
    tpot_p50_s: Annotated[Number, "s", "time per output token, median"] = None
    tpot_p99_s: Annotated[Number, "s", "time per output token, 99th percentile"] = None
    tpot_ci_low_s: Annotated[Number, "s", "95 % interval of the mean TPOT, lower end"] = None
    tpot_ci_high_s: Annotated[Number, "s", "95 % interval of the mean TPOT, upper end"] = None
    itl_p50_s: Annotated[Number, "s", "inter-token latency: gap between events of a stream, median"] = None
    itl_p99_s: Annotated[Number, "s", "inter-token latency, 99th percentile"] = None
    itl_is_event_gap: Annotated[bool | None, "", "an event carried several tokens: ITL is the gap of events"] = None
    e2e_mean_s: Annotated[Number, "s", "request latency: sent to last token, mean"] = None
    e2e_p50_s: Annotated[Number, "s", "request latency, median"] = None
    e2e_p99_s: Annotated[Number, "s", "request latency, 99th percentile"] = None
    request_rate_per_s: Annotated[Number, "1/s", "completed requests per second of the window"] = None
    output_tok_per_s: Annotated[Number, "tokens/s", "output tokens received in the window per second"] = None
    output_tok_per_s_ci_low: Annotated[Number, "tokens/s", "95 % interval of the output rate, lower end"] = None
    output_tok_per_s_ci_high: Annotated[Number, "tokens/s", "95 % interval of the output rate, upper end"] = None
    decode_tok_per_s: Annotated[Number, "tokens/s", "decode rate: running requests / mean TPOT"] = None
    decode_wall_tok_per_s: Annotated[Number, "tokens/s", "output rate without the requests' first tokens"] = None
    total_tok_per_s: Annotated[Number, "tokens/s", "output rate plus prompt tokens per second"] = None
    in_flight_mean: Annotated[Number, "requests", "requests sent and not ended, time average"] = None
    little_l: Annotated[Number, "requests", "request rate × mean latency (Little's law)"] = None
    little_error: Annotated[Number, "share", "little_l / in_flight_mean - 1"] = None
    waiting_first_token: Annotated[Number, "requests", "request rate × mean TTFT"] = None
    server_running_mean: Annotated[Number, "requests", "the server's gauge of running requests, mean"] = None
    server_waiting_mean: Annotated[Number, "requests", "the server's gauge of waiting requests, mean"] = None
    cache_hit_share: Annotated[Number, "share", "prompt tokens found in the server's prefix cache"] = None
    preemptions: Annotated[Number, "requests", "preemptions that the server counted"] = None
    server_prefill_mean_s: Annotated[Number, "s", "the server's histogram of prefill times, mean"] = None
    server_queue_mean_s: Annotated[Number, "s", "the server's histogram of queue times, mean"] = None
    goodput_per_s: Annotated[Number, "1/s", "requests per second that met every given SLO"] = None
    gpu_power_mean_w: Annotated[Number, "W", "GPU power, mean"] = None
    gpu_clock_mean_mhz: Annotated[Number, "MHz", "clock of the GPU's SMs, mean"] = None
    gpu_power_capped_share: Annotated[Number, "share", "time that the power limit held the clock down"] = None
    gpu_throttled_share: Annotated[Number, "share", "time that heat or a hardware brake held the clock down"] = None
    client_gap_mean_s: Annotated[Number, "s", "pause of a client between two requests, mean"] = None
    client_cpu_s: Annotated[Number, "s", "CPU time of the load client in the window"] = None
    client_loop_lag_p99_s: Annotated[Number, "s", "lag of the client's event loop, 99th percentile"] = None
    started_at: Annotated[str | None, "UTC", "when the point began, ISO 8601"] = None
    verdict: Annotated[Verdict | None, "", "valid, suspect or invalid"] = None
    reasons: Annotated[tuple[Reason, ...], "", "why it is not valid, the gravest first"] = ()
    # the fields above are in every file, the fields below only where they are known
    arrival_rate_per_s: Annotated[Number, "1/s", "request rate that actually arrived (open loop)"] = None
    client_added_tpot_s: Annotated[Number, "s", "median TPOT added by the client (--self-check)"] = None
    client_added_ttft_s: Annotated[Number, "s", "median TTFT added by the client (--self-check)"] = None
    client_output_tokens: Annotated[Number, "tokens", "output tokens the client counted between two scrapes"] = None
    converged: Annotated[bool | None, "", "the intervals of mean latency and TTFT were narrow enough"] = None
    count_tokens: Annotated[str | None, "", "how tokens are counted where the server gives no usage"] = None
    counted_without_usage: Annotated[int | None, "requests", "answers without usage: tokens counted otherwise"] = None
    cut_at_end: Annotated[int | None, "requests", "requests cut off when the point ended"] = None
    e2e_ci_high_s: Annotated[Number, "s", "95 % interval of the mean latency, upper end"] = None
    e2e_ci_low_s: Annotated[Number, "s", "95 % interval of the mean latency, lower end"] = None
    e2e_p90_s: Annotated[Number, "s", "request latency, 90th percentile"] = None
    endpoint: Annotated[str | None, "", "where the requests went, after redirects"] = None
    errors: Annotated[Mapping[str, int] | None, "requests", "the most frequent error messages, with counts"] = None
    events_over_tokens: Annotated[int | None, "requests", "streams with more token events than tokens"] = None
    finite_requests: Annotated[int | None, "requests", "sent in all: measured from the first to the last"] = None
    fingerprint: Annotated[str | None, "", "digest of what the point was made with (requests/made_with.json)"] = None
    first_event_unknown: Annotated[int | None, "requests", "streams whose first event has no token count"] = None
    goodput_share: Annotated[Number, "share", "attempted requests that met every given SLO"] = None
    gpu_power_limit_default_w: Annotated[Number, "W", "the card's default power limit"] = None
    gpu_power_limit_w: Annotated[Number, "W", "the power limit in force"] = None
    gpu_utilization_mean: Annotated[Number, "share", "GPU utilization, mean"] = None
    hidden_reasoning_tokens: Annotated[int | None, "tokens", "reasoning tokens that were not streamed"] = None
    bunched: Annotated[int | None, "requests", "answers whose first read brought several of their events"] = None
    tail_mean_s: Annotated[float | None, "s", "from the last token to the end of the stream"] = None
    hung: Annotated[int | None, "requests", "requests that hung unanswered when the point ended"] = None
    in_flight_first_quarter: Annotated[Number, "requests", "in flight in the window's first quarter (open loop)"] = None
    in_flight_last_quarter: Annotated[Number, "requests", "in flight in the window's last quarter (open loop)"] = None
    in_flight_cap: Annotated[int | None, "requests", "most in flight in an open loop, the others wait"] = None
    kv_cache_usage_mean: Annotated[Number, "share", "the server's gauge of KV cache usage, mean"] = None
    little_edge: Annotated[Number, "share", "error of Little's law that the window's ends may cause"] = None
    model: Annotated[str | None, "", "the model's name in the requests"] = None
    notes: Annotated[Sequence[str] | None, "", "further remarks on how it was measured"] = None
    output_tokens_off: Annotated[int | None, "requests", "answers that were not as long as asked"] = None
    probes: Annotated[str | None, "", "what was sent to learn what the server takes"] = None
    prompt_tokens_mean: Annotated[Number, "tokens", "prompt length by the server's count, mean"] = None
    prompt_tokens_off: Annotated[int | None, "requests", "prompts that were not as long as asked"] = None
    prompts: Annotated[str | None, "", "what prompts consist of: token ids from a range, or words"] = None
    repeats_prompts: Annotated[bool | None, "", "it sends earlier prompts again on purpose (prefix_cache sweep)"] = None
    request_fields: Annotated[str | None, "", "further fields of a request that the server took"] = None
    running_mean: Annotated[Number, "requests", "requests that a batching engine works on at once, mean"] = None
    saturated: Annotated[bool | None, "", "the queue grew from start to end (open loop)"] = None
    schedule_lag_p50_s: Annotated[Number, "s", "sent after the scheduled time, median (open loop)"] = None
    schedule_lag_p99_s: Annotated[Number, "s", "sent after the scheduled time, 99th percentile (open loop)"] = None
    scrape_edge_tokens: Annotated[Number, "tokens", "output tokens received while a scrape lasted"] = None
    seed: Annotated[int | None, "", "load.seed: prompts, pauses and arrivals follow from it"] = None
    server_counters_reset: Annotated[bool | None, "", "the server's counters fell: it was started again"] = None
    server_output_tokens: Annotated[Number, "tokens", "output tokens the server counted between two scrapes"] = None
    server_ttft_mean_s: Annotated[Number, "s", "the server's histogram of TTFT, mean"] = None
    slo_e2e_s: Annotated[Number, "s", "service level: limit on request latency"] = None
    slo_tpot_s: Annotated[Number, "s", "service level: limit on TPOT"] = None
    slo_ttft_s: Annotated[Number, "s", "service level: limit on TTFT"] = None
    source: Annotated[str | None, "", "where a published point was printed"] = None
    speed: Annotated[Number, "", "of a trace: its arrivals came so many times as fast"] = None
    temperature: Annotated[Number, "", "sampling temperature sent"] = None
    tokens_per_event: Annotated[Number, "tokens", "output tokens per event of a stream, mean"] = None
    top_k: Annotated[int | None, "", "top_k sent"] = None
    top_p: Annotated[Number, "", "top_p sent"] = None
    tpot_drift: Annotated[Number, "share", "mean TPOT of the window's second half against its first"] = None
    tpot_p90_s: Annotated[Number, "s", "time per output token, 90th percentile"] = None
    tpot_min_s: Annotated[Number, "s", "time per output token, minimum"] = None
    ttft_drift: Annotated[Number, "share", "mean TTFT of the window's second half against its first"] = None
    ttft_min_s: Annotated[Number, "s", "time to first token, minimum"] = None
    ttft_p99_ci_high_s: Annotated[Number, "s", "95 % interval of the 99th percentile of TTFT, upper end"] = None
    ttft_p99_ci_low_s: Annotated[Number, "s", "95 % interval of the 99th percentile of TTFT, lower end"] = None
    turns: Annotated[tuple[Turn, ...] | None, "", "conversations turn by turn: requests, prompt tokens, TTFT"] = None
    unfinished: Annotated[int | None, "requests", "requests of the window that did not end"] = None
    url: Annotated[str | None, "", "the server's URL as given, without user and password"] = None
    usage_cached_share: Annotated[Number, "share", "cached prompt tokens by the answers' usage"] = None
    usage_cached_tokens: Annotated[int | None, "tokens", "cached prompt tokens by the answers' usage"] = None
    wall_s: Annotated[Number, "s", "time that measuring the point took"] = None
    warmup_failures: Annotated[int | None, "requests", "failed requests of the warm-up"] = None
    workload: Annotated[str | None, "", "the named workload whose requests were sent"] = None
    # keys of the file that this version does not know, kept when the point is written again
    other: Annotated[Mapping[str, Any], "", ""] = field(default_factory=dict)

    @property
    def key(self) -> PointKey:
        """Identifies the point within its run."""
        return self.sweep, self.engine, self.point_id

    @property
    def place(self) -> dict[str, str]:
        """The key as keyword arguments or columns (POINT_KEY)."""
        return dict(zip(POINT_KEY, self.key, strict=True))

    def measured(self, metric: Metric) -> Number:
        """The measured figure that a prediction of the metric is compared with."""
        match metric:
            case "ttft_s":
                return self.ttft_mean_s
            case "tpot_s":
                return self.tpot_mean_s
            case "e2e_s":
                return self.e2e_mean_s
            case "output_tok_per_s":
                return self.output_tok_per_s
            case "decode_tok_per_s":
                return self.decode_tok_per_s
            case "request_rate_per_s":
                return self.request_rate_per_s

    if (
        not TYPE_CHECKING
    ):  # for notebooks written when a point was a dict; hidden from mypy, so this package cannot use it

        def __getitem__(self, column: str) -> Any:
            warnings.warn(f'write point.{_attribute(column)} for point["{column}"]', DeprecationWarning, stacklevel=2)
            return self.to_json()[column]

        def get(self, column: str, default: Any = None) -> Any:
            """The column's value, or `default` if the point does not have it."""
            warnings.warn(f'write point.{_attribute(column)} for .get("{column}")', DeprecationWarning, stacklevel=2)
            return self.to_json().get(column, default)

    def to_json(self) -> dict[str, Any]:
        """The point as stored: every column of POINT_COLUMNS, and the further columns that are known."""
        out = {column: getattr(self, name) for column, name in _ATTRIBUTES.items()}
        out = {c: v for c, v in out.items() if v is not None or c in _ALWAYS}
        out["reasons"] = [r.text for r in self.reasons]
        out["reason_codes"] = [r.code.value for r in self.reasons]
        if self.turns is not None:
            out["turns"] = list(self.turns)
        return out | dict(self.other)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> MeasuredPoint:
        """A stored point, also of an earlier version. Raises KeyError if it lacks its key."""
        known = {name: stored[column] for column, name in _ATTRIBUTES.items() if column in stored}
        for name in POINT_KEY:
            known["point_id" if name == "point" else name] = str(stored[name])
        texts, codes = stored.get("reasons") or [], stored.get("reason_codes")
        pairs = zip(texts, codes if codes is not None else [None] * len(texts), strict=True)
        known["reasons"] = tuple(stored_reason(text, code) for text, code in pairs)
        if "repeats_prompts" not in stored:
            known["repeats_prompts"] = _repeats_prompts(stored)
        if stored.get("turns") is not None:
            known["turns"] = tuple(stored["turns"])
        other = {k: v for k, v in stored.items() if k not in _ATTRIBUTES and k not in ("reasons", "reason_codes")}
        return cls(**known, other=other)


def _attribute(column: str) -> str:
    return "point_id" if column == "point" else column


def _repeats_prompts(stored: Mapping[str, Any]) -> bool | None:
    """For points stored by 0.1.0 and earlier, which mark repeated prompts in the point's name."""
    return True if stored.get("kind") == "prefix_cache" and stored["point"].startswith("same-") else None


_NAMES = [f.name for f in fields(MeasuredPoint) if f.name != "other"]
# column of points.csv → attribute, without the reasons
_ATTRIBUTES = {("point" if name == "point_id" else name): name for name in _NAMES if name != "reasons"}
_FIRST = _NAMES.index("reasons") + 1
# columns of every stored point, in order; then further columns, by name
POINT_COLUMNS = tuple("point" if name == "point_id" else name for name in _NAMES[:_FIRST])
FURTHER_COLUMNS = ("reason_codes", *sorted(_NAMES[_FIRST:]))
_ALWAYS = frozenset(POINT_COLUMNS)
_HINTS = get_type_hints(MeasuredPoint)
# columns with a quantity: in a table, NaN where nothing was reported
NUMBER_COLUMNS = frozenset(c for c, name in _ATTRIBUTES.items() if _HINTS[name] in (int, int | None, float | None))
