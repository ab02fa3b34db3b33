"""The HTTP port: opened once by the daemon, shared by all frontends.

Without SO_REUSEPORT on purpose: with it a second instance on the same port would start and take
half of the requests.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from daemon.errors import ConfigurationError, DeepInferError

BACKLOG = 4096


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Bind and listen on `host`:`port`; port 0 takes a free one.

    Raises:
        ConfigurationError: the host does not resolve, or is no address of this machine.
        DeepInferError: the port is in use or not allowed.
    """
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise ConfigurationError(
            f"The host {host!r} does not resolve ({reason}): "
            "give an address of this machine with --host."
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from error
    return listener


def open_port_warning(host: str, has_keys: bool) -> str | None:
    """The sentence for whoever lets strangers in without a key; None: nobody does.

    `host` is one that `open_listening_socket` has taken, or will.
    """
    if has_keys:
        return None
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return None
    if ipaddress.ip_address(found[0][4][0]).is_loopback:
        return None
    return (
        f"It listens on {host} without API keys: everybody who can reach this machine can use it, read its "
        "state and empty its caches. Give --api-keys-file, or listen on 127.0.0.1."
    )


def _bind_error(host: str, port: int, error: OSError) -> DeepInferError:
    where = base_url(host, port).removeprefix("http://")
    if error.errno == errno.EADDRINUSE:
        return DeepInferError(
            f"Port {port} is already in use ({where}): stop what listens there, "
            "or choose another one with --port."
        )
    if error.errno == errno.EACCES:
        return DeepInferError(
            f"Port {port} may not be opened by this user: choose one above 1023 with --port."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigurationError(
            f"{host!r} is no address of this machine: give one that is with --host."
        )
    reason = os.strerror(error.errno) if error.errno else str(error)
    return DeepInferError(f"Listening on {where} failed ({reason}): try another --host or --port.")


def base_url(host: str, port: int) -> str:
    bare = host.strip("[]")
    if bare in ("0.0.0.0", "::"):
        bare = "127.0.0.1"
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"
