"""What a server says that is no token: its errors, however it sends them, and answers that are no stream."""

from __future__ import annotations

import json
import re
from typing import Any

from .tokens import Event, choice_of

# Raw control characters inside a text are the model's, not a fault of the event. json.loads with an option makes a
# decoder for every call
_EVENTS = json.JSONDecoder(strict=False)
_WORDS = ("error", "message", "detail")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


def finish_reason(event: Event | None) -> Any:
    """Why the event's first choice ended, None where it goes on."""
    return (choice_of(event or {}) or {}).get("finish_reason")


def told_error(lines: list[bytes], events: list[Event | None]) -> tuple[str | None, int | None]:
    """The server's message with its status, however it sends one: an error object, an event named error, a line."""
    named = False
    for line in lines:
        if line.startswith(b"error:"):
            return error_message(line[6:]), _status(parse(line[6:]))
        if line.startswith(b"event:"):
            named = line[6:].strip() == b"error"
        elif named and line.startswith(b"data:"):
            return error_message(line[5:]), _status(parse(line[5:]))
    for event in events:
        if event and (event.get("error") or "error" in (event.get("object"), event.get("type"))):
            return error_message(event), _status(event)
    if any(finish_reason(event) == "error" for event in events):
        return "finish_reason is error", None
    return None, None


def _status(event: Event | None) -> int | None:
    """The HTTP status that an error object carries."""
    error = (event or {}).get("error")
    for told in (error if isinstance(error, dict) else {}, event or {}):
        for key in ("code", "status", "status_code", "http_status_code"):
            if re.fullmatch("[1-5][0-9][0-9]", str(told.get(key))):
                return int(told[key])
    return None


def no_choice(events: list[Event | None]) -> str | None:
    """What a stream says none of whose events has a choice or usage, None where it says nothing."""
    told = [event for event in events if event]
    if not told or any("choices" in event or event.get("usage") for event in told):
        return None
    return error_message(next((e for e in told if any(k in e for k in _WORDS)), told[0]))


def no_stream(body: bytes) -> str | None:
    """What an answer says that has no event with a token in it, None where it says nothing."""
    words = b"\n".join(line for line in body.splitlines() if line.strip() and not line.startswith(_FIELDS))
    words = words.removeprefix(b"error:").strip()
    if not words:
        return None
    whole = parse(words)
    if whole and "choices" in whole:
        return "the server answers in one piece, not as a stream"
    return f"answered without a stream: {error_message(words)}"


def parse(line: bytes) -> Event | None:
    """An event's JSON object, None for what is none."""
    try:  # bytes that are no UTF-8 are the model's, not a fault of the event
        event = _EVENTS.decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def error_message(body: dict[str, Any] | bytes | str) -> str:
    """The readable part of an error answer, whatever its shape, on one line of at most 300 characters, without what a
    terminal would act on."""
    found: Any = body
    if isinstance(found, bytes):
        found = found.decode(errors="replace")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return one_line(found)
    for _ in range(3):
        if isinstance(found, list) and found:
            found = found[0]
        if isinstance(found, dict):
            found = next((found[key] for key in _WORDS if found.get(key)), None) or json.dumps(found)
    return one_line(str(found))


def one_line(text: str, longest: int = 300) -> str:
    """A stranger's text on one line: printable characters only."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * longest])
    return " ".join(shown.split())[:longest]
