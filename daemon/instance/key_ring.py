"""The API keys of an instance: read here, once for all of its frontends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from daemon.errors import ConfigurationError
from transport.messages.from_daemon import ApiKeys

BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

log = logging.getLogger(__name__)


class KeyRing:
    """The keys in use, and the files that they come from."""

    def __init__(self, api_keys_file: Path | None, admin_keys_file: Path | None) -> None:
        """Read both files. None: there is no such file.

        Raises:
            ConfigurationError: one of them cannot be used.
        """
        # Absolute: a reload must find the same files.
        self._users = api_keys_file and api_keys_file.absolute()
        self._admins = admin_keys_file and admin_keys_file.absolute()
        self.keys = self._read()

    def reload(self) -> None:
        """Read both files again; if one of them cannot be used, the keys of both stay as they are.

        Raises:
            ConfigurationError: that is so, or there are no files.
        """
        if self._users is None and self._admins is None:
            raise ConfigurationError(
                "The instance has no file of API keys: start it with --api-keys-file."
            )
        self.keys = keys = self._read()
        log.info(
            "read the API keys: %d for users, %d for administration",
            len(keys.users),
            len(keys.admins),
        )

    def _read(self) -> ApiKeys:
        return ApiKeys(
            _read_keys(self._users, "--api-keys-file"),
            _read_keys(self._admins, "--admin-keys-file"),
        )


def _read_keys(path: Path | None, option: str) -> tuple[bytes, ...]:
    """One key a line. Blank lines and lines that start with `#` are skipped."""
    if path is None:
        return ()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"The API keys file {path} cannot be read ({error.strerror}): check {option}."
        ) from error
    # Files that are put together have the mark of an editor within them, too.
    keys = [line.strip().removeprefix(BYTE_ORDER_MARK).strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith(b"#")]
    if not keys:
        raise ConfigurationError(
            f"The API keys file {path} holds no key: write one a line, or leave {option} out."
        )
    # UTF-16 has NUL bytes.
    if any(byte < 0x20 or byte == 0x7F for key in keys for byte in key):
        raise ConfigurationError(
            f"The API keys file {path} holds characters that no request can send: write the keys as "
            f"plain text (UTF-8 or ASCII), one a line, or check {option}."
        )
    return tuple(keys)
