"""One log format for all processes: time, level, process, message."""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[LogLevel, ...]] = get_args(LogLevel)


def configure_logging(process: str, level: str) -> None:
    """Log to standard error, which the daemon's own log shares. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<12} %(message)s",
            datefmt="%Y-%m-%d %H:%M:%S",
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    for noisy in ("httpx", "urllib3", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
