"""What a server's URL may be."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_server_url(text: str) -> bool:
    """Whether this is http://HOST or https://HOST, with a port that can be one or none."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        return False
