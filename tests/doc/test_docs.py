"""The documentation says what the code says. `UPDATE_DOCS=1 pytest tests/doc` rewrites the tables."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import tomllib
import typing
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest

from daemon.cli.main import app
from daemon.configuration.config import InstanceConfig
from transport import messages
from transport.messages.any import AnyMessage
from transport.messages.base import Message
from transport.messages.from_daemon import (
    FrontendNotice,
    RouterNotice,
    ToClient,
    TokenizerNotice,
    ToProcess,
    WorkerNotice,
)
from transport.messages.tap import ToTapper
from transport.messages.telemetry import Snapshot
from transport.messages.to_daemon import ToDaemon
from transport.messages.to_frontend import ToFrontend
from transport.messages.to_router import ToRouter
from transport.messages.to_tokenizer import ToTokenizer
from transport.messages.to_worker import ToWorker
from transport.telemetry.catalog import METRICS

ROOT = Path(__file__).parents[2]
DOC = ROOT / "doc"
OPTIONS = {"--" + field.name.replace("_", "-") for field in fields(InstanceConfig)}


def block(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", (DOC / page).read_text(), re.S)
    assert found, f"{page} has no block {name!r}"
    return found[1]


def check_block(page: str, name: str, wanted: str) -> None:
    if os.environ.get("UPDATE_DOCS"):
        path = DOC / page
        old = block(page, name)
        path.write_text(
            path.read_text().replace(f"<!-- {name} -->\n{old}", f"<!-- {name} -->\n{wanted}")
        )
    assert block(page, name) == wanted, f"doc/{page} is out of date: run UPDATE_DOCS=1 pytest"


def first_sentence(text: str | None) -> str:
    plain = " ".join((text or "").split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", plain)[0].replace("|", "\\|")


RECEIVERS = {
    "router": ToRouter | RouterNotice,
    "tokenizer": ToTokenizer | TokenizerNotice,
    "worker": ToWorker | WorkerNotice,
    "frontend": ToFrontend | FrontendNotice,
    "every process": ToProcess,
    "daemon": ToDaemon | Snapshot,
    "client": ToClient,
    "tapper": ToTapper,
}


def kinds(union: object) -> tuple[type[Message], ...]:
    """The members of a union; a message that is alone in its union is that union."""
    return typing.get_args(union) or (union,)  # type: ignore[return-value]


def message_table() -> str:
    rows = ["| message | to | fields | |", "|---|---|---|---|"]
    for kind in kinds(AnyMessage):
        receivers = ", ".join(name for name, union in RECEIVERS.items() if kind in kinds(union))
        assert receivers, f"nobody takes a {kind.__name__}"
        names = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(kind))
        rows.append(
            f"| `{kind.__name__}` | {receivers} | {names} | {first_sentence(kind.__doc__)} |"
        )
    return "\n".join(rows) + "\n"


def option_table() -> str:
    rows = ["| option | default | |", "|---|---|---|"]
    for argument in app["serve"].assemble_argument_collection(parse_docstring=True):
        if argument.name not in OPTIONS:
            continue
        default = argument.field_info.default
        shown = "" if default in (None, (), argument.field_info.empty) else f"`{default}`"
        text = " ".join(argument.parameter.help.split())
        if choices := argument.get_choices():
            text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        rows.append(f"| `{argument.name}` | {shown} | {text} |".replace("|  |", "| |", 1))
    assert len(rows) == 2 + len(OPTIONS)
    return "\n".join(rows) + "\n"


def metric_table() -> str:
    rows = ["| metric | kind | labels | counted by | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        sources = ", ".join(metric.sources)
        rows.append(
            f"| `{metric.exposed_name}` | {metric.kind} | {labels} | {sources} | {metric.help} |"
        )
    return "\n".join(rows) + "\n"


def room_table() -> str:
    rows = ["| package | rooms |", "|---|---|"]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for contract in tool["contracts"]:
        for package in contract.get("containers", ()):
            layers = [layer.replace(" | ", ", ") for layer in contract["layers"]]
            rows.append(f"| `{package}` | {' → '.join(layers)} |")
    return "\n".join(rows) + "\n"


def test_the_message_table_is_true():
    check_block("wire_protocol.md", "messages", message_table())


def test_the_option_table_is_true():
    check_block("configuration.md", "options", option_table())


def test_the_metric_table_is_true():
    check_block("metrics.md", "metrics", metric_table())


def test_the_rooms_are_those_that_import_linter_holds():
    check_block("architecture.md", "rooms", room_table())


def test_every_message_is_in_the_union():
    defined = {
        kind
        for module in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}.")
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        if issubclass(kind, Message) and kind is not Message
    }
    assert defined == set(typing.get_args(AnyMessage))


@pytest.mark.parametrize(
    "page", [*sorted(DOC.glob("*.md")), ROOT / "README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("path", ["request path", "page path"])
def test_the_steps_of_a_way_are_where_the_architecture_page_says(path):
    listed = block("architecture.md", path)
    steps = re.findall(r"^\d+\. .*\[`([^`]+)`\]\(([^)]+)\) `([\w.]+)`\.$", listed, re.M)
    assert len(steps) == len(listed.strip().splitlines())
    for shown, target, symbol in steps:
        assert target == f"../{shown}"
        module = importlib.import_module(shown.removesuffix(".py").replace("/", "."))
        assert attrgetter(symbol)(module), f"{shown} has no {symbol}"
