"""`deepinfer keys`: the API keys of a live instance."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from cyclopts import App

from daemon.cli.inspect.session import ASK_SECONDS
from daemon.cli.output import sentence_console
from daemon.cli.target import DEFAULT_TARGET, Target
from daemon.errors import DeepInferError
from daemon.inspection.inspection_client import InspectionClient
from daemon.inspection.report_types import KeysReport

CONFIRM_SECONDS: Final = 5.0
"""How long the frontends may take to read the new keys."""
LOOK_SECONDS: Final = 0.1

keys_app = App(name="keys", help="The API keys of a live instance.")


@keys_app.command
def reload(*, target: Target = DEFAULT_TARGET) -> None:
    """Read the files of --api-keys-file and --admin-keys-file again, for all frontends.

    Keys that are no longer in them open nothing from then on; requests that run go on. If a file cannot
    be read or holds no key, the keys stay as they are.
    """
    with InspectionClient(target.find(), target.instance) as client:
        report = _decode(client.reload_keys(ASK_SECONDS))
        deadline = time.monotonic() + CONFIRM_SECONDS
        while report.unconfirmed and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            report = _decode(client.ask("keys", ASK_SECONDS))
    if report.unconfirmed:
        raise DeepInferError(
            f"The keys have been read, but {', '.join(report.unconfirmed)} has not confirmed them within "
            f"{CONFIRM_SECONDS:g} s: it checks against them as soon as it goes on."
        )
    sentence_console().print(
        f"Keys in use by all frontends: {report.users} for users, {report.admins} for administration."
    )


def _decode(answer: bytes) -> KeysReport:
    return msgspec.json.decode(answer, type=KeysReport)
