"""systemd's notification protocol."""

from __future__ import annotations

import os
import socket

import pytest

from daemon.system.sd_notify import ServiceManager, watchdog_seconds


@pytest.mark.parametrize("abstract", [False, True])
def test_messages_arrive(tmp_path, abstract):
    address = f"@deepinfer-test-{os.getpid()}" if abstract else str(tmp_path / "n.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
        peer.bind("\0" + address[1:] if abstract else address)
        peer.settimeout(5)
        manager = ServiceManager(address)
        manager.status("loading\nREADY=1")
        manager.ready()
        manager.extend_timeout(1.5)
        manager.watchdog()
        manager.stopping()
        manager.close()
        assert [peer.recv(4096) for _ in range(5)] == [
            b"STATUS=loading READY=1",
            b"READY=1",
            b"EXTEND_TIMEOUT_USEC=1500000",
            b"WATCHDOG=1",
            b"STOPPING=1",
        ]


@pytest.mark.parametrize("address", ["", "/nonexistent/n.sock"])
def test_without_a_listener_nothing_happens(address):
    manager = ServiceManager(address)
    manager.ready()
    manager.close()
    manager.close()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "20000000"}, 20.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}, 20.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "x"}, None),
    ],
)
def test_the_watchdog_interval(monkeypatch, environment, seconds):
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert watchdog_seconds() == seconds


def test_what_finds_no_room_with_a_busy_manager_is_sent_when_there_is_some(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        service = ServiceManager(str(tmp_path / "notify"))
        for number in range(1000):
            service.status(f"turn {number}")  # does not wait: the queue holds far fewer
        service.ready()
        service.status("serving")
        received = []
        while "STATUS=serving" not in received:
            received.append(manager.recv(100).decode())
            service.deliver()
        assert received[-2:] == ["READY=1", "STATUS=serving"]
        assert "STATUS=turn 999" not in received  # overtaken
        service.stopping()
        service.close()
        assert manager.recv(100) == b"STOPPING=1"
