"""doc/operations.md names only commands, options and exit codes that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from daemon.cli.main import app
from daemon.configuration.config import InstanceConfig
from daemon.errors import EXIT_FAILED, EXIT_USAGE
from transport.child import EXIT_FATAL, EXIT_ORPHANED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "doc/operations.md").read_text()
OF_COMMANDS = {
    "--root", "--prefix", "--executable", "--json", "--follow", "--once", "--bodies", "--instance",
}  # fmt: skip


def test_every_option_exists():
    options = {"--" + field.name.replace("_", "-") for field in fields(InstanceConfig)}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= options | OF_COMMANDS


def test_every_command_exists():
    for words in re.findall(r"`(?:[\w/]*/)?deepinfer ((?:[a-z]+[ `])+)", PAGE):
        command = app
        for word in words.strip("` ").split():
            if not list(command):
                break
            assert word in command, f"deepinfer {words}"
            command = command[word]


def test_every_exit_code_is_told():
    told = re.findall(r"^\| (\d+) \|", PAGE, re.M)
    assert set(map(int, told)) == {0, EXIT_FAILED, EXIT_USAGE, 130, EXIT_FATAL, EXIT_ORPHANED}


def test_every_log_line_is_in_the_code():
    code = "\n".join(
        path.read_text()
        for folder in ("daemon", "frontend", "transport", "workers")
        for path in (ROOT / folder).rglob("*.py")
    )
    table = PAGE.split("## Log lines")[1]
    for line in re.findall(r"^\| `([^`]+)` \|", table, re.M):
        for part in re.split(r"…|worker/0|[():]", line):
            words = part.strip(" ;.s")
            if len(words) > 3 and words != "degraded":
                assert words in code, f"no such log line: {line!r} ({words!r})"
