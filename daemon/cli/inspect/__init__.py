"""`deepinfer inspect`: ask a live instance what it is doing. One file per command."""

from __future__ import annotations

from cyclopts import App

from daemon.cli.inspect.cache import cache
from daemon.cli.inspect.log_level import log_level
from daemon.cli.inspect.processes import processes
from daemon.cli.inspect.queues import queues
from daemon.cli.inspect.requests import requests
from daemon.cli.inspect.sockets import sockets
from daemon.cli.inspect.stacks import stacks
from daemon.cli.inspect.tap import tap

inspect_app = App(name="inspect", help="Ask a live instance what it is doing.")
inspect_app.command(processes)
inspect_app.command(requests)
inspect_app.command(queues)
inspect_app.command(cache)
inspect_app.command(sockets)
inspect_app.command(stacks)
inspect_app.command(log_level)
inspect_app.command(tap)
