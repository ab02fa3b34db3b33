"""API keys: one a line in a file."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from frontend.errors import ApiError


class ApiKeysError(ValueError):
    """The file of API keys cannot be used."""


class ApiKeys:
    """The keys that open the API; none at all means that it is open."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._keys = keys

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Blank lines and lines that start with `#` are skipped.

        Raises:
            ApiKeysError: the file cannot be read or holds no key.
        """
        if path is None:
            return cls(())
        try:
            lines = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise ApiKeysError(
                f"The API keys file {path} cannot be read ({error.strerror}): check --api-keys-file."
            ) from error
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith(b"#"))
        if not keys:
            raise ApiKeysError(
                f"The API keys file {path} holds no key: write one a line, or leave --api-keys-file out."
            )
        return cls(keys)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises ApiError (401) unless a key is in `Authorization: Bearer` or `X-Api-Key`."""
        if not self._keys:
            return
        given = _given_key(headers)
        if given is None:
            raise _refusal("This server wants an API key: send it as Authorization: Bearer KEY.")
        # Every key is compared, so that the time does not tell which one came close.
        if not sum(hmac.compare_digest(given, key) for key in self._keys):
            raise _refusal("The API key is not one of this server's.")


def _given_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key")


def _refusal(message: str) -> ApiError:
    return ApiError(
        401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    )
