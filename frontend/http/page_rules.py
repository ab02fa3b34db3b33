"""Which pages of the web may use this server through the browser of somebody who can reach it.

A browser sends what any page asks it to send, to any server, with a true `Origin`. What it asks first
(a preflight) is left out for requests that a form could have sent: so bodies must say that they are JSON,
and an origin must be known. A page can also come to us under a name of its own that resolves to our
address (DNS rebinding); then it has no foreign origin, but a foreign `Host`. Whoever sends an API key is
no such page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from frontend.errors import ApiError
from frontend.http.reply import Headers

Names = Mapping[bytes, bytes]

PREFLIGHT_SECONDS = b"600"


class PageRules:
    """What `Origin` and `Host` may be."""

    def __init__(self, origins: tuple[str, ...], host: str, address: str) -> None:
        """`origins`: the allowed ones; `host`: what the instance was told to listen on; `address`: what
        that is."""
        self._origins = frozenset(origin.lower() for origin in origins)
        self._names = {_name_in(host), *(urlsplit(origin).hostname or "" for origin in origins)}
        self._is_local = ipaddress.ip_address(address).is_loopback

    def check(self, headers: Names) -> None:
        """For a request that no key protects.

        Raises:
            ApiError: 421, the name is not ours; 403, the page is a stranger's.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if self._is_local and not self._is_ours(host):
            raise ApiError(
                421,
                f"{host[:100]!r} is no name of this server, which serves this machine only, without API "
                "keys: ask for localhost, or start it with --host, --cors-origin or --api-keys-file.",
                code="unknown_host",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and origin not in self._origins and urlsplit(origin).netloc != host.lower():
            raise ApiError(
                403,
                f"Pages of {origin[:100]!r} may not use this server: name their origin in --cors-origin, or "
                "set API keys with --api-keys-file.",
                code="origin_not_allowed",
            )

    def answer_headers(self, headers: Names) -> Headers:
        """What every answer says, so that a page of an allowed origin can read it."""
        if not self._origins:
            return []
        if not self._is_allowed(headers):
            return [(b"vary", b"Origin")]
        return [
            (b"vary", b"Origin"),
            (b"access-control-allow-origin", headers[b"origin"]),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]

    def preflight_headers(self, method: str, headers: Names) -> Headers | None:
        """The answer to a browser that asks whether a page of an allowed origin may send its request.
        None: this is no such question."""
        if method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if not self._is_allowed(headers):
            return None
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (
                b"access-control-allow-headers",
                headers.get(b"access-control-request-headers", b"content-type"),
            ),
            (b"access-control-allow-private-network", b"true"),
            (b"access-control-max-age", PREFLIGHT_SECONDS),
        ]

    def _is_allowed(self, headers: Names) -> bool:
        return headers.get(b"origin", b"").decode("latin-1").lower() in self._origins

    def _is_ours(self, host: str) -> bool:
        """Addresses are: a page can get a name to lead to us, but not an address of its own."""
        name = _name_in(host)
        if not host or name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name_in(host: str) -> str:
    """Of `localhost:8888`, `[::1]:8888` or `::1`."""
    if host.count(":") > 1 and not host.startswith("["):
        return host
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host
