"""Which URLs are valid server URLs."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_server_url(text: str) -> bool:
    """Whether this is http://HOST or https://HOST, with an optional valid port."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port, or an incomplete IPv6 address
        return False
