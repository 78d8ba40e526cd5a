"""A streaming client for any OpenAI-compatible server: aiohttp, raw reads, time-stamped on arrival.

One class with one life cycle (connect, send, follow redirects, list models), therefore one module.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import pairwise
from typing import Literal
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.streams import StreamReader

from ..common import latency
from ..common.errors import ServebookError
from ..common.urls import is_server_url
from .connections import Connector, Tapped, error_body, now, packed, page, read_tapped, reused
from .stream import TokenStream, error_message, one_line

__all__ = ["NO_TOKEN", "NO_USAGE", "Client", "CountBy", "Reply", "endpoint_url", "now", "without_secrets"]

CountBy = Literal["usage", "events", "asked"]
NO_USAGE = (
    "no usage in the stream that counts its tokens: they are unknown (count_tokens: events counts events, asked takes "
    "the requested length; servebook measure: --count-tokens)"
)
NO_TOKEN = "answered with no token"
_SOON = aiohttp.ClientTimeout(total=10, sock_connect=5)
_CONNECT_S = 10.0
_STALE_S = 1.0  # a connection that was closed before says so within a round trip; later, the server had the request
_BODY_END_S, _BODY_END_AGAIN_S = 0.5, 0.02  # wait for the body's end after [DONE], so that the connection is kept


@dataclass(slots=True, eq=False)
class Reply:
    """One request and its response. Times are `now()` seconds, None until they happen."""

    index: int
    prompt_tokens_asked: int
    output_tokens_asked: int
    scheduled: float | None = None  # scheduled send time (open loop)
    sent: float | None = None
    end: float | None = None
    error: str | None = None
    status: int | None = None
    phase: str = "drain"
    turn: int = 0  # turn of its conversation
    stream: TokenStream = field(default_factory=TokenStream)
    counted: CountBy = "usage"  # how its tokens are counted
    retry_after_s: float | None = None  # the Retry-After of a busy server
    location: str | None = None  # the target of a redirect

    @property
    def ok(self) -> bool:
        """Whether the whole answer came without a fault."""
        return self.end is not None and self.error is None

    @property
    def begun(self) -> float | None:
        """The start of latencies: the scheduled time in an open loop, the send time in a closed one."""
        return self.scheduled if self.scheduled is not None else self.sent

    @property
    def first(self) -> float | None:
        """Time of the first token's event."""
        return self.stream.times[0] if self.stream.times else None

    @property
    def last(self) -> float | None:
        """Time of the last token's event."""
        return self.stream.times[-1] if self.stream.times else None

    @property
    def ttft_s(self) -> float | None:
        """Time from `begun` to the first token."""
        return self.first - self.begun if self.first is not None and self.begun is not None else None

    @property
    def e2e_s(self) -> float | None:
        """Time from `begun` to the last token."""
        return self.last - self.begun if self.last is not None and self.begun is not None else None

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - tokens in the first event); a first event without a token count is
        assumed to carry one token."""
        if self.first is None or self.last is None or not self.stream.tokens:
            return None
        if len(self.stream.times) < 2:
            return None
        return latency.tpot_s(self.first, self.last, self.stream.tokens, self.stream.first_tokens or 1)

    def gaps_s(self) -> list[float]:
        """Times between consecutive arrivals of token events; events of one read are one arrival."""
        t = self.stream.times
        return [b - a for a, b in pairwise(t)]


class Client:
    """Sends request bodies to `url`'s endpoint over persistent connections. Use as `async with`.

    count_by: how tokens are counted if the server reports no usage: not at all, as events, or as requested.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str = "/v1/completions",
        api_key: str | None = None,
        timeout_s: float = 600.0,
        count_by: CountBy = "usage",
    ) -> None:
        _check_url(url)
        if api_key and "@" in urlsplit(url).netloc:
            what = "contains a user name, and an API key is given: a request can carry only one of them"
            raise ServebookError(what, without_secrets(url), "Leave one of them out")
        self.url, self.endpoint, self.timeout_s = url.rstrip("/"), endpoint_url(url, endpoint), timeout_s
        self.count_by: CountBy = count_by
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._key = api_key
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._body_end_s = _BODY_END_S
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._connector = Connector()
        self.session = self._session(self._connector)
        return self

    def _session(self, connector: Connector) -> aiohttp.ClientSession:
        # no proxy from the environment: it would be measured with the server
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            auto_decompress=False,
            read_bufsize=1 << 18,
            headers=self._headers,
        )

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()
        if self._fresh is not None:
            await self._fresh.close()

    async def open_connections(self, count: int) -> None:
        """Open this many connections before the first wave. Raises ServebookError if nothing answers."""
        faults = await self._connector.open(self.url, count, _CONNECT_S)
        if len(faults) == count:
            where, fix = without_secrets(self.url), fix_unreachable(faults[0], "correct the URL")
            raise ServebookError(f"no server answers ({faults[0]})", where, fix)

    async def stream(self, body: bytes, reply: Reply) -> None:
        """Send one request and fill in its reply; faults become `reply.error`, only cancellation is raised."""
        if await self._attempt(self.session, body, reply):
            if self._fresh is None:
                self._fresh = self._session(Connector(keep=False))
            reply.error = None
            await self._attempt(self._fresh, body, reply, last=True)
        # the time when the stream ended; waking this task later is the client's delay, not the server's
        reply.end = now() if reply.error else reply.stream.last_read_s or now()
        self._settle(reply)
        if self._key and reply.error:  # servers quote the rejected key, and errors are stored
            reply.error = reply.error.replace(self._key, "[key]")

    async def _attempt(self, session: aiohttp.ClientSession, body: bytes, reply: Reply, *, last: bool = False) -> bool:
        """Send the request once. True if it went into a connection that the server had already closed: the server has
        not seen it, so it must be sent again on a new connection."""
        stream, fault = reply.stream, None
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                stream.on_over = partial(self._await_body_end, limit)
                await self._exchange(session, body, reply)
        except TimeoutError:
            fault = f"timed out after {self.timeout_s:g} s"
            if stream.over:  # close its connection, and idle ones sooner
                self._body_end_s = _BODY_END_AGAIN_S
        except aiohttp.ClientPayloadError:
            fault = "connection cut mid-stream"
        except aiohttp.ClientResponseError as error:  # from its first bytes on
            fault = f"the answer is not valid HTTP ({one_line(error.message, 100)})"
        except aiohttp.ServerDisconnectedError:
            fault = "server closed the connection without an answer"
            if _was_stale(reply):
                return not last
        except (aiohttp.ClientError, OSError) as error:
            fault = f"{type(error).__name__}: {error}"[:300]
            if _was_stale(reply) and isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
                return not last
        finally:
            stream.on_over = None
        if fault and not stream.over:  # after [DONE] the answer is complete
            reply.error = fault
        return False

    def _await_body_end(self, limit: asyncio.Timeout) -> None:
        limit.reschedule(asyncio.get_running_loop().time() + self._body_end_s)

    async def _exchange(self, session: aiohttp.ClientSession, body: bytes, reply: Reply) -> None:
        feed, reply.stream.asked = reply.stream.feed, body
        reused.set(False)
        reply.sent = now()
        async with session.post(self.endpoint, data=body, allow_redirects=False) as response:
            reply.status = response.status
            if response.status != 200:
                await self._refused(response, reply)
                return
            if encoding := packed(response):
                reply.error = f"the answer is compressed ({encoding}), although the request asked for no compression"
                return
            content, protocol = response.content, response.connection and response.connection.protocol
            if isinstance(protocol, Tapped) and type(content) is StreamReader:
                await read_tapped(content, protocol, feed)
            while data := await content.readany():
                feed(data, now())

    async def _refused(self, response: aiohttp.ClientResponse, reply: Reply) -> None:
        reply.location = response.headers.get("Location")
        words = error_message(await error_body(response)) or response.reason or ""
        if reply.location and 300 <= response.status < 400:
            words = f"redirected to {reply.location}"
        reply.error = f"HTTP {response.status}: {words}"
        reply.retry_after_s = _retry_after_s(response.headers)

    def follow(self, location: str) -> None:
        """Send requests to the target of this endpoint's redirect. Raises ServebookError for another host, which must
        get neither the load nor the key."""
        there = urljoin(self.endpoint, location)
        parts = urlsplit(there)
        elsewhere = parts.hostname != urlsplit(self.endpoint).hostname or parts.scheme not in ("http", "https")
        if elsewhere or there == self.endpoint:
            where, fix = without_secrets(self.endpoint), "Give that URL, if that server is meant"
            raise ServebookError(f"redirects to {there}", where, fix)
        self.endpoint = there

    def _settle(self, reply: Reply) -> None:
        stream = reply.stream
        stream.finish()
        if reply.error:
            return
        if stream.error:
            reply.error = f"error in the stream: {stream.error}"
        elif stream.fault:
            reply.error = stream.fault
        elif not stream.ended:
            reply.error = "the stream ended without [DONE]"
        elif stream.tokens is None and self.count_by != "usage":
            self._count(reply)
        elif stream.tokens is None:
            reply.error = NO_USAGE
        if reply.error is None and (not stream.tokens or not stream.times):
            reply.error = NO_TOKEN

    def _count(self, reply: Reply) -> None:
        """The number of tokens of an answer without usage, counted as the user chose."""
        stream, reply.counted = reply.stream, self.count_by
        if self.count_by == "asked" and stream.stopped:
            reply.error = "ended before the requested length, and without usage its length is unknown"
            return
        stream.take_count(stream.events if self.count_by == "events" else reply.output_tokens_asked)

    async def models(self) -> list[str]:
        """The server's model ids. Raises ServebookError if it lists none."""
        where, reason = endpoint_url(self.url, "/v1/models"), "no model in the answer"
        fix = "Start it, or name the model"
        try:
            async with self.session.get(where, timeout=_SOON) as response:
                body = await page(response)
                if response.status != 200:
                    reason = f"HTTP {response.status}: {error_message(body)}"
                    fix = "Check the key, or name the model" if response.status in (401, 403) else "Name the model"
                else:
                    listed = json.loads(body)
                    data = listed.get("data") if isinstance(listed, dict) else listed
                    ids = [m["id"] for m in data or () if isinstance(m, dict) and isinstance(m.get("id"), str)]
                    if ids := [name for name in dict.fromkeys(ids) if name]:
                        return ids
                    fix = "Name the model"
        except TimeoutError:
            reason = f"no answer within {_SOON.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            reason, fix = str(error) or type(error).__name__, fix_unreachable(error, "name the model")
        except (ValueError, TypeError, RecursionError):
            pass
        raise ServebookError(f"cannot ask the server for its model ({reason})", without_secrets(where), fix)


def _was_stale(reply: Reply) -> bool:
    """Whether a request without an answer went into a connection that the server had closed before it came."""
    return reused.get() and reply.status is None and now() - (reply.sent or 0.0) < _STALE_S


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a busy server asks to wait: given as such, or as a date by the server's own clock; None for what is
    neither."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]*)?", value):
        return float(value)
    try:
        clock = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(UTC)
        return max(0.0, (parsedate_to_datetime(value) - clock).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


def fix_unreachable(fault: BaseException | None, otherwise: str) -> str:
    """How to fix an unreachable server."""
    untrusted = isinstance(fault, aiohttp.ClientConnectorCertificateError)
    return "Name a file of certificates to trust in SSL_CERT_FILE" if untrusted else f"Start it, or {otherwise}"


def _check_url(url: str) -> None:
    if not is_server_url(url):
        raise ServebookError("not a server's URL", url or "--url", "Give it as http://HOST:PORT")
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.path.rstrip("/").endswith("/completions"):
        fix = "Leave out what follows /v1; to pass a key, name its environment variable"
        raise ServebookError("contains more than a server's address", without_secrets(url), fix)


def endpoint_url(url: str, endpoint: str) -> str:
    """URL of an endpoint; /v1 is not duplicated if the base URL already ends in it."""
    base = url.rstrip("/")
    return base + endpoint.removeprefix("/v1") if base.endswith("/v1") else base + endpoint


def without_secrets(url: str) -> str:
    """The URL without user, password and query, for storing."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
