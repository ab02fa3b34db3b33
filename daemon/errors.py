"""The error that ends a command with one sentence for the user."""

from __future__ import annotations

from typing import Final

EXIT_FAILED: Final = 1
"""The command was understood, but could not be done."""
EXIT_USAGE: Final = 2
"""A flag, variable or file has a wrong value."""


class DeepInferError(RuntimeError):
    """One sentence that says what is wrong and what to do. `exit_code` is the command's."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.is_printed = False


class ConfigurationError(DeepInferError):
    """A value of the configuration cannot work on this machine."""

    def __init__(self, message: str) -> None:
        super().__init__(message, EXIT_USAGE)
