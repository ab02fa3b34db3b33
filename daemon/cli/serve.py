"""`deepinfer serve`: run an instance in the foreground."""

from __future__ import annotations

import logging
import os

from daemon.cli.output import unfailing_output
from daemon.configuration.config import InstanceConfig
from daemon.configuration.sources import ignored_variables
from daemon.system.standard_output import StandardOutput
from daemon.system.stop_signals import StopRequested, StopSignals
from transport.logs import configure_logging

log = logging.getLogger(__name__)


def serve(config: InstanceConfig | None = None) -> None:
    """Run an instance in the foreground until Ctrl-C, SIGTERM or `deepinfer stop`.

    With no options it serves a small chat model on http://127.0.0.1:8888.
    """
    with unfailing_output() as output:
        _serve(config or InstanceConfig(), output)


def _serve(config: InstanceConfig, output: StandardOutput) -> None:
    # Imported here: the other commands do not wait for what only a daemon needs.
    from daemon.instance.run_instance import run_instance  # noqa: PLC0415

    configure_logging("daemon", config.log_level)
    for sentence in ignored_variables(os.environ):
        log.warning("%s", sentence)
    has_keys = config.api_keys_file is not None or config.admin_keys_file is not None
    signals = StopSignals(hangup_reloads=has_keys)
    try:
        run_instance(config, signals, output)
    except StopRequested:
        log.info("stopped before anything was started")
    finally:
        signals.close()
