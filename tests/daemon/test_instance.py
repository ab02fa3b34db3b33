"""The daemon's main loop over stand-in children: ready, lost, hopeless, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from daemon.configuration.config import InstanceConfig
from daemon.errors import DeepInferError
from daemon.inspection.control_server import ControlServer
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import KeysReport
from daemon.instance.instance import Instance
from daemon.instance.key_ring import KeyRing
from daemon.instance.role_settings import make_plan
from daemon.supervision.child_output import ChildOutput
from daemon.supervision.child_process import ChildSpec
from daemon.supervision.supervisor import Supervisor
from daemon.system.run_directory import RunDirectory
from daemon.system.stop_signals import StopSignals
from tests.support.waiting import eventually
from transport.child import ProcessSettings
from transport.ids import ProcessName
from transport.sockets import Endpoints

ROOT = Path(__file__).parents[2]
SECONDS = 30.0


class StandIns:
    """An instance of stand-in children; `run` blocks like the daemon's main thread does."""

    def __init__(self, tmp_path: Path, hash_of_children: str | None = None, **options) -> None:
        self.path = tmp_path / "run"
        self.journal = tmp_path / "journal"
        self.journal.touch()
        self.config = InstanceConfig(run_dir=self.path, heartbeat_seconds=0.05, **options)
        self.plan = make_plan(self.config, tmp_path, self.path, os.getpid())
        self.hash = hash_of_children or self.plan.config_hash
        self.ready_urls: list[str] = []
        self.printed: list[bytes] = []

    def spec(self, name: str, act: str) -> ChildSpec:
        role = name.partition("/")[0]
        process = ProcessSettings(
            name=ProcessName(name),
            role=role,
            instance="default",
            run_dir=str(self.path),
            parent_pid=os.getpid(),
            config_hash=self.hash,
            heartbeat_seconds=0.05,
        )
        settings = {"process": process, "act": act, "journal": str(self.journal)}
        return ChildSpec(
            ProcessName(name),
            role,
            "stand_in_child",
            msgspec.json.encode(settings),
            {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        )

    def run(self, children: dict[str, str], meanwhile=None, at_once: bool = False) -> None:
        """Run until the instance has ended. `meanwhile(self)` runs on a thread once it is ready, or
        at once, and must make it stop."""
        directory = RunDirectory.lock(self.path, "default")
        keys = KeyRing(self.config.api_keys_file, self.config.admin_keys_file)
        signals = StopSignals(hangup_reloads=True)
        context = zmq.Context()
        server = ControlServer(context, Endpoints(str(self.path)), self.plan.config_hash)
        printed = ChildOutput(self.printed.append)
        specs = [self.spec(name, act) for name, act in children.items()]
        self.supervisor = Supervisor(specs, directory.record_children, printed)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                meanwhile(self)
            except BaseException as error:  # noqa: BLE001  re-raised on the main thread
                failures.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=work)

        def on_ready(url: str) -> None:
            self.ready_urls.append(url)
            if meanwhile is not None and not at_once:
                thread.start()

        if at_once:
            thread.start()
        try:
            with printed:
                Instance(self.plan, self.supervisor, server, 8888, keys, on_ready).run(signals)
        finally:
            if thread.ident is not None:
                thread.join(SECONDS)
            server.close()
            context.term()
            signals.close()
            directory.close()
        if failures:
            raise failures[0]

    def client(self) -> InspectionClient:
        return InspectionClient(self.path, "default")

    def ask(self, what: str):
        with self.client() as client:
            return msgspec.json.decode(client.ask(what, SECONDS))

    def stop(self, drain_timeout: float | None = 0.0) -> None:
        with self.client() as client:
            client.stop(drain_timeout)

    def wait_for_line(self, *parts: str) -> str:
        """The first line of the journal that holds all parts."""
        eventually(lambda: self.lines(*parts))
        return self.lines(*parts)[0]

    def lines(self, *parts: str) -> list[str]:
        """All lines of the journal that hold all parts."""
        lines = self.journal.read_text().splitlines()
        return [line for line in lines if all(part in line for part in parts)]

    def pid_of(self, name: str) -> int:
        rows = self.ask("processes")
        return next(row["pid"] for row in rows if row["name"] == name)


GROUP = {"router": "ready", "worker/0": "ready", "tokenizer/0": "ready", "frontend/0": "ready"}


def test_it_serves_when_all_are_ready_and_stops_when_asked(tmp_path):
    stand_ins = StandIns(tmp_path)
    pids = []

    def meanwhile(instance: StandIns) -> None:
        assert instance.ask("status")["state"] == "ready"
        pids.extend(row["pid"] for row in instance.ask("processes"))
        instance.stop()

    stand_ins.run(GROUP, meanwhile)
    assert stand_ins.ready_urls == ["http://127.0.0.1:8888"]
    assert not stand_ins.path.exists()
    assert [pid for pid in pids if pid != os.getpid() and psutil.pid_exists(pid)] == []
    stand_ins.wait_for_line("frontend/0", "drain")
    stand_ins.wait_for_line("router", "drain")


def test_children_share_a_process_group_that_is_not_the_daemons(tmp_path):
    groups = set()

    def meanwhile(instance: StandIns) -> None:
        for row in instance.ask("processes"):
            if row["name"] != "daemon":
                groups.add(os.getpgid(row["pid"]))
        instance.stop()

    StandIns(tmp_path).run(GROUP, meanwhile)
    assert len(groups) == 1
    assert groups != {os.getpgid(0)}


@pytest.mark.parametrize("victim", ["router", "worker/0", "tokenizer/0", "frontend/0"])
def test_a_killed_child_is_started_again_and_frontends_hear_of_it(tmp_path, victim):
    def meanwhile(instance: StandIns) -> None:
        old = instance.pid_of(victim)
        os.kill(old, signal.SIGKILL)
        if victim != "frontend/0":
            instance.wait_for_line("frontend/0", "status degraded", victim)
        eventually(lambda: instance.pid_of(victim) not in (old, None))
        eventually(lambda: instance.ask("status")["state"] == "ready")
        row = next(r for r in instance.ask("processes") if r["name"] == victim)
        assert row["restarts"] == 1
        instance.wait_for_line("frontend/0", "status ready")
        if victim != "router":
            instance.wait_for_line("router", "PeerLost", victim)
        instance.stop()

    StandIns(tmp_path).run(GROUP, meanwhile)


RESERVED = {**GROUP, "frontend/0": "reserved", "frontend/1": "ready"}


def test_it_is_not_ready_before_every_frontend_acts_on_it(tmp_path):
    def meanwhile(instance: StandIns) -> None:
        instance.wait_for_line("frontend/0", "status ready")
        instance.wait_for_line("frontend/1", "status ready")
        status = instance.ask("status")
        assert (status["state"], "frontend/0: not told yet" in status["reason"]) == (
            "starting",
            True,
        )
        assert instance.ready_urls == []
        (tmp_path / "confirm").touch()
        eventually(lambda: instance.ready_urls)
        assert instance.ask("status")["state"] == "ready"

        (tmp_path / "confirm").unlink()
        os.kill(instance.pid_of("worker/0"), signal.SIGKILL)
        eventually(lambda: len(instance.lines("frontend/0", "status ready")) == 2)
        assert instance.ask("status")["state"] == "degraded"
        (tmp_path / "confirm").touch()
        eventually(lambda: instance.ask("status")["state"] == "ready")
        assert len(instance.ready_urls) == 1
        instance.stop()

    StandIns(tmp_path).run(RESERVED, meanwhile, at_once=True)


def test_the_successor_of_a_frontend_that_died_without_a_word_has_to_confirm_as_well(tmp_path):
    def meanwhile(instance: StandIns) -> None:
        instance.wait_for_line("frontend/0", "status ready")
        old = instance.pid_of("frontend/0")
        os.kill(old, signal.SIGKILL)
        eventually(lambda: instance.pid_of("frontend/0") not in (old, None))
        new = instance.pid_of("frontend/0")
        instance.wait_for_line(f"frontend/0 {new} ", "status ready")
        assert instance.ask("status")["state"] == "starting"
        (tmp_path / "confirm").touch()
        eventually(lambda: instance.ready_urls)
        instance.stop()

    StandIns(tmp_path).run(RESERVED, meanwhile, at_once=True)


def test_a_frontend_that_never_confirms_is_named_and_not_waited_for_for_ever(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("daemon.instance.frontend_status.CONFIRM_SECONDS", 0.5)
    StandIns(tmp_path).run(RESERVED, lambda instance: instance.stop())
    (line,) = [line for line in caplog.messages if "no sign within" in line]
    assert line.startswith("frontend/0: no sign within 0.5 s")


def test_every_router_is_told_of_a_worker_that_is_lost_for_good(tmp_path):
    def meanwhile(instance: StandIns) -> None:
        old = instance.pid_of("router")
        os.kill(instance.pid_of("worker/0"), signal.SIGTERM)
        instance.wait_for_line(f"router {old} ", "PeerLost worker/0 for good")
        os.kill(old, signal.SIGKILL)
        eventually(lambda: instance.pid_of("router") not in (old, None))
        new = instance.pid_of("router")
        instance.wait_for_line(f"router {new} ", "PeerLost worker/0 for good")
        instance.stop()

    StandIns(tmp_path).run({**GROUP, "worker/0": "mortal", "worker/1": "ready"}, meanwhile)


@pytest.mark.parametrize("victim", ["frontend/0", "worker/0", "router", "tokenizer/0"])
def test_an_instance_that_has_lost_a_role_for_good_ends_with_an_error(tmp_path, victim):
    def meanwhile(instance: StandIns) -> None:
        os.kill(instance.pid_of(victim), signal.SIGTERM)

    stand_ins = StandIns(tmp_path, drain_timeout=0.0)
    role = victim.partition("/")[0]
    with pytest.raises(DeepInferError, match=f"no {role} is left: {victim} is lost for") as caught:
        stand_ins.run({**GROUP, victim: "mortal"}, meanwhile)
    assert caught.value.exit_code == 1  # 2 would keep systemd from starting another
    assert stand_ins.supervisor.num_alive == 0
    assert not stand_ins.path.exists()


def test_all_frontends_have_the_keys_of_the_daemon_also_one_that_starts_later(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    old, new = "with keys one", "with keys one,two"

    def meanwhile(instance: StandIns) -> None:
        for name in ("frontend/0", "frontend/1"):
            instance.wait_for_line(name, f"status ready  {old}")
        keys.write_text("one\ntwo\n")
        killed = instance.pid_of("frontend/0")
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: instance.pid_of("frontend/0") not in (killed, None))
        restarted = instance.pid_of("frontend/0")
        instance.wait_for_line(f"frontend/0 {restarted} ", f"status ready  {old}")
        assert instance.lines(new) == []

        with instance.client() as client:
            report = msgspec.json.decode(client.reload_keys(SECONDS), type=KeysReport)
        assert (report.users, report.admins) == (2, 0)
        for name in ("frontend/0", "frontend/1"):
            instance.wait_for_line(name, f"status ready  {new}")
        eventually(lambda: instance.ask("keys")["unconfirmed"] == [])
        instance.stop()

    StandIns(tmp_path, api_keys_file=keys).run({**GROUP, "frontend/1": "ready"}, meanwhile)


def test_sighup_reloads_the_keys_and_keeps_the_old_ones_where_that_fails(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("daemon.system.stop_signals._has_terminal", lambda: False)
    keys = tmp_path / "keys"
    keys.write_text("one\n")

    def meanwhile(instance: StandIns) -> None:
        instance.wait_for_line("frontend/0", "status ready  with keys one")
        keys.write_text("")
        os.kill(os.getpid(), signal.SIGHUP)
        eventually(lambda: "holds no key" in caplog.text)
        assert "the keys stay as they are" in caplog.text
        with instance.client() as client, pytest.raises(DeepInferError, match="holds no key"):
            client.reload_keys(SECONDS)
        assert instance.ask("keys")["users"] == 1
        keys.write_text("two\n")
        os.kill(os.getpid(), signal.SIGHUP)
        instance.wait_for_line("frontend/0", "status ready  with keys two")
        instance.stop()

    StandIns(tmp_path, api_keys_file=keys).run(GROUP, meanwhile)


def test_without_a_keys_file_there_is_nothing_to_reload(tmp_path):
    def meanwhile(instance: StandIns) -> None:
        with instance.client() as client, pytest.raises(DeepInferError, match="--api-keys-file"):
            client.reload_keys(SECONDS)
        instance.stop()

    StandIns(tmp_path).run(GROUP, meanwhile)


def test_the_group_survives_the_death_of_all_children(tmp_path):
    def meanwhile(instance: StandIns) -> None:
        pids = [instance.pid_of(name) for name in GROUP]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: instance.ask("status")["state"] == "degraded")
        eventually(lambda: instance.ask("status")["state"] == "ready")
        new = [instance.pid_of(name) for name in GROUP]
        assert not set(pids) & set(new)
        assert len({os.getpgid(pid) for pid in new}) == 1
        instance.stop()

    StandIns(tmp_path).run(GROUP, meanwhile)


@pytest.mark.parametrize(
    ("act", "reason", "exit_code"),
    [
        ("fatal", "worker/0 cannot start: the disk is on fire", 2),
        ("crash", "worker/0 cannot start: exit code 3", 1),
    ],
)
def test_a_hopeless_child_fails_the_start(tmp_path, act, reason, exit_code):
    stand_ins = StandIns(tmp_path)
    with pytest.raises(DeepInferError, match=reason) as caught:
        stand_ins.run({**GROUP, "worker/0": act})
    assert caught.value.exit_code == exit_code
    assert stand_ins.ready_urls == []
    assert not stand_ins.path.exists()
    assert stand_ins.supervisor.num_alive == 0


def test_a_start_that_takes_too_long_fails(tmp_path):
    stand_ins = StandIns(tmp_path, start_timeout=1.5)
    with pytest.raises(DeepInferError, match=r"not ready after 1\.5 s.*--start-timeout"):
        stand_ins.run({**GROUP, "worker/0": "never-ready"})


def test_children_of_another_configuration_are_refused(tmp_path):
    stand_ins = StandIns(tmp_path, hash_of_children="other")
    with pytest.raises(DeepInferError, match="cannot start"):
        stand_ins.run({"worker/0": "ready"})
    stand_ins.wait_for_line("refused", "another configuration")


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    stand_ins = StandIns(tmp_path)
    stand_ins.run({**GROUP, "worker/0": "deaf"}, lambda instance: instance.stop())
    assert stand_ins.supervisor.num_alive == 0


def test_signals_stop_it_too_also_while_it_starts(tmp_path):
    stand_ins = StandIns(tmp_path)
    asked = threading.Thread(
        target=lambda: (
            stand_ins.wait_for_line("frontend/0", "status starting"),
            os.kill(os.getpid(), signal.SIGINT),
        )
    )
    asked.start()
    stand_ins.run({**GROUP, "worker/0": "never-ready"})
    asked.join(SECONDS)
    assert stand_ins.ready_urls == []
    assert not stand_ins.path.exists()


def test_a_stranger_cannot_join(tmp_path):
    def meanwhile(instance: StandIns) -> None:
        stranger = instance.spec("worker/0", "ready")
        settings = msgspec.json.decode(stranger.settings)
        settings["process"]["parent_pid"] = os.getpid()
        with subprocess.Popen(
            [sys.executable, "-m", stranger.module],
            stdin=subprocess.PIPE,
            env={**os.environ, **stranger.environment},
        ) as process:
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            assert process.returncode == 1
        instance.wait_for_line("refused", "is not worker/0 of this instance")
        instance.stop()

    StandIns(tmp_path).run(GROUP, meanwhile)
