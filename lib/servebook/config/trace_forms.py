"""The forms that public traces come in, each as rows: arrival, lengths, session, and what the prompt shares.

azure: TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference 2023 and 2024). burstgpt: Timestamp, Request
tokens, Response tokens (rows without an answer failed and are left out), Session ID where there. mooncake: timestamp
in ms, input_length, output_length, hash_ids of 512 tokens each. timed: the same with seconds and 16 tokens, as vLLM's
timed traces. sharegpt: conversations with texts, from and value or role and content. vllm_custom: prompt texts with
output_tokens, as vLLM's custom data set. inference_perf: its configuration file with a shared prefix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from ..common.errors import ServebookError

FORMATS = ("servebook", "azure", "burstgpt", "mooncake", "timed", "sharegpt", "vllm_custom", "inference_perf")
# form → the keys that tell it
KEYS = {
    "servebook": ("prompt_tokens", "output_tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
    "timed": ("timestamp", "input_length", "output_length"),
    "sharegpt": ("conversations",),
    "vllm_custom": ("prompt", "output_tokens"),
    "inference_perf": ("num_groups", "num_prompts_per_group", "system_prompt_len", "question_len", "output_len"),
}
MOONCAKE_TOKENS, TIMED_TOKENS = 512, 16  # tokens per hash id
MOST_TOKENS = 2**31 - 1
MOST_REQUESTS = 10_000_000  # for a configuration that only counts requests
_TALKS = ("conversations", "conversation", "messages")
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "ai")
_ISO = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d+))? ?(Z|[+-]\d\d:?\d\d)?")
_A_TIME = re.compile(r"arrival|timestamp|time|ts|start_?(time|s|ms)?$|sent", re.IGNORECASE)
_MS_SINCE_1970 = 1e11  # as seconds it is the year 5138


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace. parts: the beginning of its prompt, as (name of a token stream, tokens)."""

    line: int
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    session: Hashable = None
    parts: tuple[tuple[Hashable, int], ...] = ()


def rows(
    records: Iterable[tuple[int, Any]], form: str | None, path: Path, tokens_per_word: float, notes: list[str]
) -> Iterator[TraceRow]:
    """The requests of a file's lines; notes collects assumptions and omissions. Raises ServebookError."""
    left_out, named = 0, form is not None
    for line, record in records:
        where = f"{path}, line {line}"
        if not isinstance(record, Mapping):
            raise ServebookError("is not a request", where, "Write one object per line, with its keys")
        form = form or _form(record, where)
        missing = [k for k in KEYS[form] if k not in record]
        if missing and not (form == "sharegpt" and _talk(record) is not None):
            raise ServebookError(f"has no {', '.join(missing)}", where, f"The form {form} has {', '.join(KEYS[form])}")
        if form == "sharegpt":
            yield from _conversation(record, line, where, tokens_per_word)
        elif form == "inference_perf":
            yield from _shared_prefix(record, line, where)
        elif form == "mooncake" and not named and number(record, "timestamp", where) % 1:
            what = f"timestamp is {record['timestamp']}: of a second, or of a millisecond as Mooncake's whole numbers?"
            raise ServebookError(what, where, "Give the workload its format: timed is in seconds, mooncake in ms")
        elif form == "burstgpt" and str(record["Response tokens"]).strip() in ("0", "0.0"):
            left_out += 1
        else:
            yield READERS[form](record, line, where, tokens_per_word)
    if left_out:
        notes.append(f"{left_out} requests without an answer (they failed) are left out")
    if form in ("sharegpt", "vllm_custom"):
        notes.append(f"tokens counted as {tokens_per_word:g} a word of the texts")


def _form(record: Mapping[str, Any], where: str) -> str:
    found = next((form for form, keys in KEYS.items() if all(k in record for k in keys)), None)
    if found is None and _talk(record) is not None:
        return "sharegpt"
    if found is None and "prompt" in record:  # whose output_tokens are then named as missing
        return "vllm_custom"
    if found is None:
        fields = ", ".join(list(record)[:8]) or "nothing"
        fix = f"Name arrival_s, prompt_tokens and output_tokens, or use one of the forms {', '.join(FORMATS[1:])}"
        raise ServebookError(f"the trace has {fields}, which is not a known format", where, fix)
    return found


def number(record: Mapping[str, Any], key: str, where: str, least: float = -math.inf) -> float:
    """A number of a line. Raises ServebookError for anything else."""
    given = record.get(key)
    try:
        value = math.nan if given is None or isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or value < least or _odd(given):
        bound = "" if math.isinf(least) else f" of at least {least:g}"
        raise ServebookError(
            f"{key} is {repr(given)[:60]}" if given is not None else f"has no {key}", where, f"Write a number{bound}"
        )
    return value


def _odd(given: Any) -> bool:
    """Whether a number is written as Python alone reads it."""
    return isinstance(given, str) and ("_" in given or not given.isascii())


def count(record: Mapping[str, Any], key: str, where: str, least: int = 1) -> int:
    """A whole number of a line, at least `least`. Raises ServebookError for anything else."""
    value = number(record, key, where, least)
    if value != int(value) or value > MOST_TOKENS:
        fix = f"Write a whole number of at least {least}, and below 2^31"
        raise ServebookError(f"{key} is {repr(record[key])[:60]}", where, fix)
    return int(value)


def _name(record: Mapping[str, Any], key: str, where: str) -> Hashable:
    """What names a session or a prefix, None where nothing does."""
    value = record.get(key)
    if value is not None and not isinstance(value, str | int | float):
        raise ServebookError(f"{key} is {str(value)[:60]}", where, "Name it by a text or a number")
    return value


def _arrival(record: Mapping[str, Any], given: Mapping[str, Any], where: str) -> float | None:
    """arrival_s; None without such a column. Raises ServebookError for arrival times under another name."""
    if "arrival_s" in given:
        at = number(given, "arrival_s", where)
        if at > _MS_SINCE_1970:
            raise ServebookError(f"arrival_s is {at:.0f}, which is in milliseconds", where, "Give it in seconds")
        return at
    if "arrival_s" not in record and (other := next((k for k in given if _A_TIME.match(str(k))), None)):
        raise ServebookError(f"has {other}, and no arrival_s", where, "Name it arrival_s, in seconds")
    return None


def _own(record: Mapping[str, Any], line: int, where: str, _: float) -> TraceRow:
    given = {k: v for k, v in record.items() if v not in (None, "")}
    arrival = _arrival(record, given, where)
    prompt = count(given, "prompt_tokens", where)
    parts: tuple[tuple[Hashable, int], ...] = ()
    if "prefix" in given:
        tokens = count(given, "prefix_tokens", where)
        if tokens > prompt:
            raise ServebookError(f"prefix_tokens is {tokens}, more than prompt_tokens ({prompt})", where, "Lower it")
        parts = ((("prefix", _name(given, "prefix", where)), tokens),)
    elif "hash_ids" in given:
        parts = _hashes(given, where, count({"hash_tokens": TIMED_TOKENS, **given}, "hash_tokens", where))
    session = _name(given, "session", where)
    return TraceRow(line, arrival, prompt, count(given, "output_tokens", where), session, parts)


def _azure(record: Mapping[str, Any], line: int, where: str, _: float) -> TraceRow:
    text = str(record["TIMESTAMP"]).strip()
    found = _ISO.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        day, clock, fraction, zone = found.groups()  # of the fraction, more digits than Python reads
        offset = f"{zone[:3]}:{zone[-2:]}" if zone and zone != "Z" else "+00:00"
        at = datetime.fromisoformat(f"{day}T{clock}{offset}").timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        raise ServebookError(f"TIMESTAMP is {text!r}", where, "Write it as 2023-11-16 18:15:46.6805900") from None
    return TraceRow(line, at, count(record, "ContextTokens", where), count(record, "GeneratedTokens", where))


def _burstgpt(record: Mapping[str, Any], line: int, where: str, _: float) -> TraceRow:
    prompt, output = count(record, "Request tokens", where), count(record, "Response tokens", where)
    # in a session, a prompt's length is that of the new turn or of the whole conversation, depending on BurstGPT's
    # release: every prompt is taken as new
    return TraceRow(line, number(record, "Timestamp", where), prompt, output)


def _hashes(record: Mapping[str, Any], where: str, tokens: int) -> tuple[tuple[Hashable, int], ...]:
    ids = record.get("hash_ids") or []
    if not isinstance(ids, list) or not all(type(i) in (int, str) for i in ids):
        raise ServebookError(f"hash_ids is {str(ids)[:60]}", where, "Write a list of block ids")
    return tuple((("hash", i), tokens) for i in ids)


def _mooncake(record: Mapping[str, Any], line: int, where: str, _: float) -> TraceRow:
    lengths = count(record, "input_length", where), count(record, "output_length", where)
    at = number(record, "timestamp", where) / 1e3
    return TraceRow(line, at, *lengths, None, _hashes(record, where, MOONCAKE_TOKENS))


def _timed(record: Mapping[str, Any], line: int, where: str, _: float) -> TraceRow:
    lengths = count(record, "input_length", where), count(record, "output_length", where)
    return TraceRow(line, number(record, "timestamp", where), *lengths, None, _hashes(record, where, TIMED_TOKENS))


def _custom(record: Mapping[str, Any], line: int, where: str, per_word: float) -> TraceRow:
    return TraceRow(line, None, _words(record["prompt"], per_word), count(record, "output_tokens", where))


def _talk(record: Mapping[str, Any]) -> Any:
    return next((record[key] for key in _TALKS if key in record), None)


def _conversation(record: Mapping[str, Any], line: int, where: str, per_word: float) -> Iterator[TraceRow]:
    """A turn for every question that has an answer."""
    messages = _talk(record)
    if not isinstance(messages, list):
        raise ServebookError("conversations is not a list", where, "Write the messages as a list of from and value")
    before, question = 0, 0
    for entry in messages:
        if not isinstance(entry, Mapping):
            raise ServebookError("a message has no role", where, "Write it as a list of from and value")
        words = next((entry[key] for key in ("value", "content", "text") if entry.get(key) is not None), "")
        tokens = _words(_joined(words), per_word)
        if str(entry.get("from") or entry.get("role")).lower() in _ANSWERS:
            if question:
                yield TraceRow(line, None, before + question, tokens, ("talk", line))
                before, question = before + question + tokens, 0
        else:
            question += tokens


def _joined(content: Any) -> Any:
    """The texts of a content that is a list of parts."""
    if not isinstance(content, list):
        return content
    return " ".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)


def _words(text: Any, per_word: float) -> int:
    return max(1, round(len(str(text).split()) * per_word))


def _shared_prefix(record: Mapping[str, Any], line: int, where: str) -> Iterator[TraceRow]:
    """Prompts in turn, group by group; the stages' rates give the arrivals, where there are any."""
    groups, each = count(record, "num_groups", where), count(record, "num_prompts_per_group", where)
    system = count(record, "system_prompt_len", where, 0)
    prompt, output = system + count(record, "question_len", where), count(record, "output_len", where)
    due: list[float | None] = []
    at, stages = 0.0, record.get("stages") or []
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        raise ServebookError("load.stages is not a list of rate and duration", where, "Write it as inference-perf does")
    asked = sum(number(s, "rate", where, 0) * number(s, "duration", where, 0) for s in stages) or groups * each
    if asked > MOST_REQUESTS:
        raise ServebookError(f"asks for {asked:.3g} requests", where, f"At most {MOST_REQUESTS:,} are read")
    for stage in stages:
        rate, seconds = number(stage, "rate", where, 1e-9), number(stage, "duration", where, 0)
        due += [at + i / rate for i in range(round(rate * seconds))]
        at += seconds
    for i, arrival in enumerate(due or [None] * (groups * each)):
        own = i % (groups * each)
        parts = (((("group", own % groups)), system), (("prompt", own), prompt - system))
        yield TraceRow(line, arrival, prompt, output, None, parts if system else parts[1:])


def of_config(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """The one record of an inference-perf configuration: its shared prefix and the stages of its load."""
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ServebookError(
            f"is not valid YAML ({str(error).splitlines()[0]})", str(path), "Correct the file"
        ) from None
    shared = ((data.get("data") or {}) if isinstance(data, Mapping) else {}).get("shared_prefix")
    if not isinstance(shared, Mapping):
        fix = "Give inference-perf's configuration with data.type: shared_prefix"
        raise ServebookError("has no data.shared_prefix", str(path), fix)
    load = data.get("load")
    yield 1, {**shared, "stages": load.get("stages") if isinstance(load, Mapping) else None}


READERS = {
    "servebook": _own, "azure": _azure, "burstgpt": _burstgpt, "mooncake": _mooncake, "timed": _timed,
    "vllm_custom": _custom,
}  # fmt: skip
