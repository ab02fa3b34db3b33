"""Instances under a real systemd, booted for these tests in namespaces over a copy of this system.

They take one and a half to three minutes, which all tests together on two cores have not to spare: so
they run only when asked for, with TEST_SYSTEMD=1 as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
SYSTEMD = Path("/usr/lib/systemd/systemd")
BIN = Path(sys.executable).parent
BOOT_SECONDS = 30.0
READY_SECONDS = 120.0
SHOWN = list(dict.fromkeys(map(str, (ROOT, sys.prefix, sys.base_prefix))))
"""What a service has to see of this system, wherever it lies: the unit hides /tmp."""
SHORT = json.dumps({"prompt": "hello", "max_tokens": 4})
LONG = json.dumps({"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "temperature": 0})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get("TEST_SYSTEMD"),
        reason="boots a systemd of its own, which takes minutes: TEST_SYSTEMD=1",
    ),
]


class Machine:
    """The booted system, looked at from outside through its namespaces."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._group = f"deepinfer-test-{secrets.token_hex(4)}"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._outer = subprocess.Popen(
                ["unshare", "--mount", str(Path(__file__).with_name("boot_systemd.sh")),
                 str(folder), self._group, str(model), *SHOWN],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def has_ended(self) -> bool:
        return self._outer.poll() is not None

    def is_running(self) -> bool:
        return self.has_ended() or self.run("systemctl", "is-active", "test.target") == 0

    def _init(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._outer.pid).children():
                if child.name() == "systemd":
                    return child
        return None

    def call(self, *words: object, seconds: float = READY_SECONDS) -> subprocess.CompletedProcess:
        """Run a command inside, as root."""
        init = self._init()
        if init is None:
            return subprocess.CompletedProcess(words, -1, "", "systemd does not run")
        return subprocess.run(
            ["nsenter", "--target", str(init.pid), "--all", "env", "-i", f"PATH={os.environ['PATH']}",
             "COLUMNS=200", *map(str, words)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def run(self, *words: object) -> int:
        return self.call(*words).returncode

    def output(self, *words: object) -> str:
        done = self.call(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout.strip()

    def show(self, unit: str, name: str) -> str:
        return self.output("systemctl", "show", "--value", "--property", name, unit)

    def deepinfer(self, *words: object) -> str:
        return self.output(BIN / "deepinfer", *words)

    def journal(self) -> str:
        return self.call("journalctl", "--no-pager", "-o", "cat", "-n", "60").stdout

    def write(self, path: str, text: str) -> None:
        self.output("sh", "-c", 'mkdir -p "$(dirname "$0")"; printf %s "$1" >"$0"', path, text)

    def make_instance(self, name: str, port: int, **options: object) -> None:
        """Options in TOML, and the accelerator in the environment file."""
        lines = {"model": "/srv/model", "port": port, "engine": "fake", **options}
        self.write(
            f"/etc/deepinfer/{name}.toml",
            "".join(f"{k} = {json.dumps(v)}\n" for k, v in lines.items()),
        )
        self.write(f"/etc/deepinfer/{name}.env", "DEEPINFER_ACCELERATOR=cpu\n")

    def http_status(self, port: int, path: str, body: str = "") -> int:
        code = (
            "import http.client, sys\n_, port, path, body = sys.argv\n"
            "c = http.client.HTTPConnection('127.0.0.1', int(port), timeout=60)\n"
            "c.request('POST' if body else 'GET', path, body or None, {'Content-Type': 'application/json'})\n"
            "r = c.getresponse()\nr.read()\nprint(r.status)"
        )
        return int(self.output(sys.executable, "-c", code, port, path, body))

    def shut_down(self) -> None:
        init = self._init()
        if init is not None:
            init.kill()
        self._outer.kill()
        self._outer.wait(30)
        # systemd's control groups outlive it.
        remove = (
            f'mount -t cgroup2 none "$0" && cd "$0/{self._group}" && echo 1 >cgroup.kill;'
            f' for i in 1 2 3 4 5; do find "$0/{self._group}" -depth -type d -exec rmdir {{}} + '
            f"&& break; sleep 0.2; done"
        )
        place = self._folder / "cgroup"
        place.mkdir(exist_ok=True)
        subprocess.run(["unshare", "--mount", "sh", "-c", remove, str(place)], check=False,
                       capture_output=True, timeout=30)  # fmt: skip


def reason_against() -> str:
    """Why systemd cannot be booted here, if that is known at once."""
    if os.geteuid() != 0:
        return "needs root"
    if not SYSTEMD.exists():
        return "systemd is not installed (Debian: apt-get install systemd)"
    if not (BIN / "deepinfer").exists():
        return f"{BIN / 'deepinfer'} is not installed"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--cgroup", "true"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture(scope="module")
def machine(tiny_dir: Path) -> Iterator[Machine]:
    reason = reason_against()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="di-", dir="/tmp"))
    machine = Machine(folder, tiny_dir)
    try:
        eventually(machine.is_running, BOOT_SECONDS, "systemd has booted")
        if machine.has_ended():
            pytest.skip(f"systemd cannot be booted here: {machine.log.read_text()[-500:]}")
        machine.deepinfer("systemd", "install")
        machine.write("/run/systemd/system/deepinfer@.service.d/place.conf",
                      f"[Service]\nBindReadOnlyPaths={' '.join(SHOWN)}\n")  # fmt: skip
        machine.output("systemctl", "daemon-reload")
        yield machine
    finally:
        machine.shut_down()
        shutil.rmtree(folder)


@pytest.fixture
def two(machine: Machine) -> Iterator[Machine]:
    """deepinfer@a at port 18001 and deepinfer@a-b, with a real engine, at 18002, both started."""
    machine.make_instance("a", 18001)
    machine.make_instance("a-b", 18002, engine="auto", kv_cache_gb=0.01, hicache_size_gb=0.01)
    machine.output("systemctl", "start", "deepinfer@a", "deepinfer@a-b")
    yield machine
    machine.run("systemctl", "stop", "deepinfer@*")
    machine.run("systemctl", "reset-failed", "deepinfer@*")


def test_active_means_ready_and_instances_do_not_disturb_each_other(two):
    # `start` has just returned: it serves at once.
    assert (two.http_status(18001, "/ready"), two.http_status(18002, "/ready")) == (200, 200)
    # The unit's filter of system calls leaves torch what it needs.
    assert two.http_status(18002, "/v1/completions", SHORT) == 200
    assert two.show("deepinfer@a", "StatusText") == "serving model at http://127.0.0.1:18001"
    status = json.loads(two.deepinfer("status", "--instance", "a-b", "--json"))
    assert (status["instance"], status["run_dir"]) == ("a-b", "/run/deepinfer/a-b")
    assert two.output("stat", "-c", "%U %a", "/run/deepinfer/a-b") == "deepinfer 700"
    owners = two.output("ps", "-o", "user=", "-p", str(status["pid"]))
    assert owners == "deepinfer"

    two.output("systemctl", "stop", "deepinfer@a")
    assert two.show("deepinfer@a", "Result") == "success"
    assert two.run("test", "-e", "/run/deepinfer/a") == 1
    after = json.loads(two.deepinfer("status", "--instance", "a-b", "--json"))
    assert after["pid"] == status["pid"]
    assert two.http_status(18002, "/ready") == 200
    two.output("systemctl", "start", "deepinfer@a")
    assert two.http_status(18001, "/ready") == 200


def test_a_killed_daemon_is_started_again(two):
    pid = two.show("deepinfer@a", "MainPID")
    neighbour = two.show("deepinfer@a-b", "MainPID")
    two.output("kill", "-9", pid)
    eventually(
        lambda: (
            two.show("deepinfer@a", "NRestarts") == "1"
            and two.show("deepinfer@a", "ActiveState") == "active"
        ),
        READY_SECONDS,
        "systemd has started it again",
    )
    assert two.show("deepinfer@a", "MainPID") not in (pid, "0")
    assert two.http_status(18001, "/ready") == 200
    assert two.show("deepinfer@a-b", "MainPID") == neighbour


def test_deepinfer_stop_is_a_stop_for_systemd_too(two):
    two.deepinfer("stop", "--instance", "a")
    eventually(
        lambda: two.show("deepinfer@a", "ActiveState") == "inactive", 30, "systemd has noticed"
    )
    assert two.show("deepinfer@a", "Result") == "success"
    assert two.show("deepinfer@a", "NRestarts") == "0"


@pytest.mark.parametrize(
    "name, options, said",
    [
        ("wrong", {"dp": 0}, "dp"),
        ("nowhere", {"model": "/srv/none"}, "The model /srv/none does not exist"),
        (r"a\x2db", {}, "An instance name starts with"),
    ],
)
def test_a_configuration_error_is_not_tried_again(machine, name, options, said):
    machine.make_instance(name, 18003, **options)
    unit = f"deepinfer@{name}.service"
    assert machine.run("systemctl", "start", unit) != 0
    assert machine.show(unit, "ActiveState") == "failed"
    assert machine.show(unit, "ExecMainStatus") == "2"
    assert machine.show(unit, "NRestarts") == "0"
    assert said in machine.journal()


def test_a_daemon_that_hangs_is_ended_by_the_watchdog(machine):
    machine.make_instance("hung", 18004)
    machine.write("/run/systemd/system/deepinfer@hung.service.d/short.conf",
                  "[Service]\nWatchdogSec=5\n")  # fmt: skip
    machine.output("systemctl", "daemon-reload")
    machine.output("systemctl", "start", "deepinfer@hung")
    pid = machine.show("deepinfer@hung", "MainPID")
    machine.output("kill", f"-{int(signal.SIGSTOP)}", pid)
    eventually(
        lambda: (
            machine.show("deepinfer@hung", "NRestarts") == "1"
            and machine.show("deepinfer@hung", "ActiveState") == "active"
        ),
        READY_SECONDS,
        "the watchdog has replaced it",
    )
    assert machine.http_status(18004, "/ready") == 200
    machine.output("systemctl", "stop", "deepinfer@hung")


def test_a_stop_waits_for_the_answers_under_way(machine):
    # The answer takes 18 s, so that a busy machine finds it running.
    machine.make_instance("slow", 18006, fake_step_ms=12, drain_timeout=120)
    # Far less than the answer takes: the daemon has to ask for more.
    machine.write("/run/systemd/system/deepinfer@slow.service.d/short.conf",
                  "[Service]\nTimeoutStopSec=1\n")  # fmt: skip
    machine.output("systemctl", "daemon-reload")
    machine.output("systemctl", "start", "deepinfer@slow")
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(machine.http_status, 18006, "/v1/completions", LONG)
        eventually(
            lambda: json.loads(machine.deepinfer("status", "--instance", "slow", "--json"))[
                "requests"
            ]["running"],
            30,
            "the request runs",
        )
        machine.output("systemctl", "stop", "deepinfer@slow")
        assert reply.result(60) == 200
    assert machine.show("deepinfer@slow", "Result") == "success"


def test_uninstall_takes_back_what_install_wrote(machine):
    machine.make_instance("last", 18005)
    machine.output("systemctl", "start", "deepinfer@last")
    refused = machine.call(BIN / "deepinfer", "systemd", "uninstall")
    assert refused.returncode == 1
    assert "deepinfer@last.service still runs" in refused.stderr
    machine.output("systemctl", "stop", "deepinfer@last")
    machine.deepinfer("systemd", "uninstall")
    assert machine.run("systemctl", "cat", "deepinfer@last") != 0
    assert machine.run("test", "-e", "/etc/deepinfer/pe.toml") == 1
    assert machine.run("test", "-e", "/etc/deepinfer/last.toml") == 0
