"""A frontend on a real socket, with a scripted router in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.frontend import Script, ServedFrontend, frontend_settings


@pytest.fixture
def serve() -> Iterator[Callable[..., ServedFrontend]]:
    """`serve(script or Script, **settings)` starts a frontend, which ends with the test."""
    running: list[ServedFrontend] = []

    def start(script=None, **changes: object):
        answer = script if callable(script) else lambda submit, payload: script or Script()
        server = ServedFrontend(frontend_settings(**changes), answer).__enter__()
        running.append(server)
        return server

    yield start
    for server in running:
        server.__exit__()
