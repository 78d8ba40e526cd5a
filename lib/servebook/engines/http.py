"""HTTP requests to a server about itself: pages, models, health. Nothing raises; no answer gives None."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

LONGEST_PAGE = 1 << 24  # most bytes read from a page
ABSENT = (None, 502, 503, 504)  # no answer, or a gateway's for a server that is not there


def http_get(url: str, *, timeout_s: float = 5.0, key: str | None = None) -> bytes | None:
    """The body of a 2xx answer, None for anything else (refused, timed out, another status)."""
    try:
        with _open(url, None, timeout_s, key) as answer:
            return _read(answer, timeout_s)
    except (OSError, ValueError, http.client.HTTPException):  # URLError and HTTPError are OSErrors
        return None


def http_status(url: str, json_body: Any, *, timeout_s: float, key: str | None = None) -> int | None:
    """The status of the answer to a GET, or to a POST if there is a body; None without an answer in time."""
    try:
        with _open(url, json.dumps(json_body).encode() if json_body else None, timeout_s, key) as answer:
            _read(answer, timeout_s)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError, http.client.HTTPException):
        return None


def answers(url: str, key: str | None = None) -> int | None:
    """The status of the answer to /v1/models; None without one, or if a gateway answers for an absent server.

    A page that the server lacks, or that fails (transformers serve without a Hub cache), counts as an answer.
    """
    status = http_status(f"{url}/v1/models", None, timeout_s=5.0, key=key)
    return None if status in ABSENT else status


def healthy(url: str, *, timeout_s: float) -> bool:
    """Whether /health reports success; a server without that page counts as healthy."""
    status = http_status(f"{url}/health", None, timeout_s=timeout_s)
    return status is not None and (status < 300 or status == 404)


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects to the same host only, because the key must not reach another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).hostname != urlsplit(req.full_url).hostname:
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# no proxy from the environment: the load client uses none either, because it would be measured with the server
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameHost)


def _open(url: str, body: bytes | None, timeout_s: float, key: str | None) -> Any:
    headers = {"Content-Type": "application/json"} if body else {}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    return _OPENER.open(urllib.request.Request(url, data=body, headers=headers), timeout=timeout_s)


def _read(answer: Any, timeout_s: float) -> bytes:
    """A body that ends in time. Raises TimeoutError for one that comes in drops: a socket's timeout starts again with
    each."""
    until, body = time.monotonic() + timeout_s, bytearray()
    while part := answer.read1(1 << 16):
        body += part
        if len(body) >= LONGEST_PAGE:
            break
        if time.monotonic() > until:
            raise TimeoutError
    return bytes(body)


def get_json(url: str, **options: Any) -> Any:
    """The JSON at a URL, None if there is none."""
    body = http_get(url, **options)
    try:
        return None if body is None else json.loads(body)
    except (ValueError, RecursionError):
        return None


def served_models(url: str, key: str | None = None) -> list[dict[str, Any]]:
    """Entries of /v1/models, [] if the server returns none."""
    answer = get_json(f"{url}/v1/models", key=key)
    data = answer.get("data") if isinstance(answer, dict) else answer
    listed = data if isinstance(data, list) else []
    return [m for m in listed if isinstance(m, dict) and isinstance(m.get("id"), str) and m["id"]]
