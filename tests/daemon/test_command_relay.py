"""Commands of a client on their way through the daemon; the clock is the test's."""

from __future__ import annotations

import os
import signal
import subprocess

import msgspec
import pytest

from daemon.inspection.command_relay import (
    GIVE_UP_SECONDS,
    MAX_COMMANDS,
    CommandError,
    CommandRelay,
)
from daemon.inspection.report_types import CommandReport
from transport.ids import ProcessName
from transport.messages.cache_report import CacheContent
from transport.messages.control import CacheCommand, DumpStacks, SetLogLevel
from transport.stacks import StackFrame, ThreadStack

CLIENT = ProcessName("client/1")
LIVING = {ProcessName("worker/0"): 11, ProcessName("router"): 12}
THREADS = [ThreadStack("MainThread", 5, [StackFrame("loop.py", 3, "run", "poll()")])]


class Frame:
    def __init__(self, data: bytes) -> None:
        self.buffer = memoryview(data)


class Control:
    """What was sent to whom; `deaf` peers take nothing."""

    def __init__(self, *deaf: str) -> None:
        self.deaf = deaf
        self.sent = []

    def send(self, peer, message, *frames) -> bool:
        if peer in self.deaf:
            return False
        self.sent.append((peer, message, *frames))
        return True

    def to(self, peer: str) -> list:
        return [item for item in self.sent if item[0] == peer]

    def reports(self) -> dict[str, CommandReport]:
        """The one answer that the client got."""
        ((_, answer, data),) = self.to(CLIENT)
        assert (answer.serial, answer.error) == (7, "")
        return {r.process: r for r in msgspec.json.decode(data, type=list[CommandReport])}


def done(relay: CommandRelay, control: Control, name: str, threads=THREADS) -> None:
    serial = control.to(name)[-1][1].serial
    relay.done(ProcessName(name), serial, [Frame(msgspec.json.encode(threads))])


def test_everybody_is_asked_and_the_client_gets_one_answer():
    control = Control()
    relay = CommandRelay(control)
    relay.start(CLIENT, DumpStacks(7), LIVING, 0.0)
    done(relay, control, "router")
    assert control.to(CLIENT) == []
    done(relay, control, "worker/0")
    reports = control.reports()
    assert list(reports) == ["daemon", "router", "worker/0"]
    assert reports["worker/0"] == CommandReport("worker/0", 11, threads=THREADS)
    assert reports["daemon"].pid == os.getpid()
    assert reports["daemon"].threads[0].name == "MainThread"
    relay.give_up(1e9)
    assert len(control.to(CLIENT)) == 1


def test_one_process_or_the_daemon_alone():
    control = Control()
    relay = CommandRelay(control)
    relay.start(CLIENT, DumpStacks(7, ProcessName("router")), LIVING, 0.0)
    done(relay, control, "router")
    assert set(control.reports()) == {"router"}
    assert control.to("worker/0") == []
    control.sent.clear()
    relay.start(CLIENT, DumpStacks(7, ProcessName("daemon")), LIVING, 0.0)
    assert set(control.reports()) == {"daemon"}


def test_only_workers_are_asked_about_their_caches():
    control = Control()
    relay = CommandRelay(control)
    relay.start(CLIENT, CacheCommand("flush", 7), LIVING, 0.0)
    assert control.to("router") == []
    assert control.to("worker/0")[0][1].action == "flush"
    content = CacheContent(enabled=True, pages_used=3, pages_total=9)
    done(relay, control, "worker/0", content)
    assert control.reports() == {"worker/0": CommandReport("worker/0", 11, cache=content)}
    with pytest.raises(CommandError, match="no process 'router' now: worker/0"):
        relay.start(CLIENT, CacheCommand("report", 7, ProcessName("router")), LIVING, 0.0)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (DumpStacks(7, ProcessName("worker/9")), "no process 'worker/9' now: daemon, worker/0"),
        (SetLogLevel("loud", 7), "no level 'loud': debug, info"),
    ],
)
def test_nonsense_is_refused(command, reason):
    control = Control()
    with pytest.raises(CommandError, match=reason):
        CommandRelay(control).start(CLIENT, command, LIVING, 0.0)
    assert control.sent == []


def test_who_takes_no_messages_is_told_at_once_beside_who_does():
    control = Control("router", "worker/0")
    CommandRelay(control).start(CLIENT, SetLogLevel("info", 7), LIVING, 0.0)
    reports = control.reports()
    assert "starting" in reports["router"].problem
    assert [reports[name].log_level for name in ("daemon", "router")] == ["info", ""]


def test_a_silent_process_is_named_with_what_the_kernel_says():
    stopped = subprocess.Popen(["sleep", "60"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        stopped.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        control = Control()
        relay = CommandRelay(control)
        living = {
            ProcessName("a"): stopped.pid, ProcessName("b"): gone.pid, ProcessName("c"): os.getpid(),
        }  # fmt: skip
        relay.start(CLIENT, DumpStacks(7), living, 100.0)
        relay.give_up(100.0 + 0.9 * GIVE_UP_SECONDS)
        assert control.to(CLIENT) == []
        relay.give_up(100.0 + GIVE_UP_SECONDS)
        reports = control.reports()
        assert f"kill -CONT {stopped.pid}" in reports["a"].problem
        assert "ended" in reports["b"].problem
        assert "native code" in reports["c"].problem
        done(relay, control, "a")  # too late: nothing happens
        assert len(control.to(CLIENT)) == 1
    finally:
        stopped.kill()
        stopped.wait()


def test_a_worker_in_a_long_step_is_not_said_to_hang():
    control = Control()
    relay = CommandRelay(control)
    relay.start(CLIENT, CacheCommand("flush", 7), {ProcessName("worker/0"): os.getpid()}, 0.0)
    relay.give_up(GIVE_UP_SECONDS)
    assert "long step" in control.reports()["worker/0"].problem


def test_a_damaged_answer_is_told():
    control = Control()
    relay = CommandRelay(control)
    relay.start(CLIENT, DumpStacks(7, ProcessName("router")), LIVING, 0.0)
    relay.done(ProcessName("router"), control.to("router")[0][1].serial, [Frame(b"[{")])
    assert "damaged" in control.reports()["router"].problem


def test_commands_under_way_are_bounded():
    relay = CommandRelay(Control())
    for _ in range(MAX_COMMANDS):
        relay.start(CLIENT, DumpStacks(7), LIVING, 0.0)
    with pytest.raises(CommandError, match="Too many"):
        relay.start(CLIENT, DumpStacks(7), LIVING, 0.0)
    relay.give_up(GIVE_UP_SECONDS)
    relay.start(CLIENT, DumpStacks(7), LIVING, 10.0)
