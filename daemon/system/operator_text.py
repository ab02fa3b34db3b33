"""Text from outside that cannot be passed on as it is."""

from __future__ import annotations

import os

from daemon.errors import ConfigurationError


def require_utf8(what: str, text: str) -> None:
    """Whether `text`, an argument, a variable or a path, can stand in messages and answers.

    Raises:
        ConfigurationError: it has bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(text).decode(errors="backslashreplace")
        raise ConfigurationError(
            f"{what} '{shown}' is not UTF-8: give the file or directory another name, or a link that has "
            "one, and name that."
        ) from error
