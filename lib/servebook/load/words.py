"""Error messages in a server's answer, in any of the forms that servers use, and answers that are not a stream."""

from __future__ import annotations

import json
import re
from typing import Any

from .tokens import Event, choice_of

# strict=False accepts raw control characters in the model's text. One shared decoder, since json.loads with an option
# creates a decoder on every call
_EVENTS = json.JSONDecoder(strict=False)
_WORDS = ("error", "message", "detail")
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


def finish_reason(event: Event | None) -> Any:
    """The finish_reason of the event's first choice; None if it has not ended."""
    return (choice_of(event or {}) or {}).get("finish_reason")


def server_error(lines: list[bytes], events: list[Event | None]) -> tuple[str | None, int | None]:
    """(error message, HTTP status in it) of a stream, each None if absent. The error may be an object, an event named
    error, or a line."""
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
    """The HTTP status in an error object; None if it has none."""
    error = (event or {}).get("error")
    for fields in (error if isinstance(error, dict) else {}, event or {}):
        for key in ("code", "status", "status_code", "http_status_code"):
            if re.fullmatch("[1-5][0-9][0-9]", str(fields.get(key))):
                return int(fields[key])
    return None


def no_choice(events: list[Event | None]) -> str | None:
    """The server's message in a stream without choices or usage; None if there is none."""
    known = [event for event in events if event]
    if not known or any("choices" in event or event.get("usage") for event in known):
        return None
    return error_message(next((e for e in known if any(k in e for k in _WORDS)), known[0]))


def non_stream_answer(body: bytes) -> str | None:
    """An error text for an answer without token events; None if the answer has no text."""
    words = b"\n".join(line for line in body.splitlines() if line.strip() and not line.startswith(_FIELDS))
    words = words.removeprefix(b"error:").strip()
    if not words:
        return None
    whole = parse(words)
    if whole and "choices" in whole:
        return "the server answers in one piece, not as a stream"
    return f"answered without a stream: {error_message(words)}"


def parse(line: bytes) -> Event | None:
    """An event's JSON object; None if it is not one."""
    try:  # bytes that are not UTF-8 may come from the model's text and are replaced
        event = _EVENTS.decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def error_message(body: dict[str, Any] | bytes | str) -> str:
    """The message in an error answer of any form, on one line of at most 300 characters, without control characters."""
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
    """An external text on one line, with printable characters only and at most `longest` of them."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * longest])
    return " ".join(shown.split())[:longest]
