"""The listening socket: opened once, never shared with a stranger."""

from __future__ import annotations

import socket

import pytest

from daemon.errors import ConfigurationError, DeepInferError
from daemon.system.listen import base_url, open_listening_socket, open_port_warning


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_port_zero_takes_a_free_one_and_accepts():
    with open_listening_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=5):
            connection, _ = listener.accept()
            connection.close()


def test_a_second_one_on_the_port_is_refused():
    with open_listening_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(DeepInferError, match=f"Port {port} is already in use.*--port"):
            open_listening_socket("127.0.0.1", port)
    open_listening_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 70, "not a host"])
def test_a_host_that_does_not_resolve(host):
    with pytest.raises(ConfigurationError, match="does not resolve"):
        open_listening_socket(host, 0)


def test_an_address_of_another_machine():
    with pytest.raises(ConfigurationError, match="no address of this machine"):
        open_listening_socket("192.0.2.1", 0)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6(host):
    with (
        open_listening_socket(host, 0) as listener,
        socket.create_connection(("::1", listener.getsockname()[1]), timeout=5),
    ):
        pass


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_url_works_from_here(host, url):
    assert base_url(host, 80) == url


@pytest.mark.parametrize(
    ("host", "is_open"),
    [
        ("127.0.0.1", False),
        ("127.0.0.9", False),
        ("localhost", False),
        ("::1", False),
        ("[::1]", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.0.2.1", True),
        ("no such host", False),
    ],
)
def test_who_lets_strangers_in_without_a_key_is_warned(host, is_open):
    warning = open_port_warning(host, has_keys=False)
    assert (warning is not None) == is_open
    assert warning is None or (host in warning and "--api-keys-file" in warning)
    assert open_port_warning(host, has_keys=True) is None
