"""One log format for all processes: time, level, process, message."""

from __future__ import annotations

import logging
import sys
import time
from typing import Final, Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LEVELS: Final[tuple[LogLevel, ...]] = get_args(LogLevel)


REPEAT_SECONDS: Final = 10.0
"""Shortest time between two lines that somebody else can cause as often as he likes."""


def _formatter(process: str) -> logging.Formatter:
    return logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)-7s {process:<12} %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


def configure_logging(process: str, level: str) -> None:
    """Log to standard error, which the daemon's own log shares. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    for noisy in ("httpx", "urllib3", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


def format_warning(text: str) -> str:
    """A line as this process logs it, for who cannot log: the log itself."""
    handlers = logging.getLogger().handlers
    formatter = handlers[0].formatter if handlers else None
    level = logging.WARNING
    fields = {"levelno": level, "levelname": logging.getLevelName(level), "msg": text}
    return (formatter or _formatter("")).format(logging.makeLogRecord(fields)) + "\n"


class Seldom:
    """Lets something happen once in `REPEAT_SECONDS`, and counts how often it has been left out."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def allows(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return False
        self._next = now + REPEAT_SECONDS
        return True

    def log(self, logger: logging.Logger, level: int, message: str, *arguments: object) -> None:
        """Log the line, or count it for the next that is logged."""
        if not self.allows():
            return
        if self._left_out:
            message += " (and %d more like it since the last such line)"
            arguments = (*arguments, self._left_out)
            self._left_out = 0
        logger.log(level, message, *arguments)
