"""Whether the key in a request opens what the request asks for."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from frontend.errors import ApiError
from transport.messages.from_daemon import ApiKeys


def check_key(keys: ApiKeys, headers: Mapping[bytes, bytes], *, for_administration: bool) -> None:
    """The key is in `Authorization: Bearer` or `X-Api-Key`. One for administration opens all paths.

    Raises:
        ApiError: 401, there is no key or a wrong one; 403, a user's key where one for administration
            is wanted.
    """
    wants_admin = for_administration and bool(keys.admins)
    if not wants_admin and not keys.users:
        return
    given = _given_key(headers)
    if given is None:
        raise _refusal("This server wants an API key: send it as Authorization: Bearer KEY.")
    is_users, is_admins = _is_among(given, keys.users), _is_among(given, keys.admins)
    if not is_users and not is_admins:
        raise _refusal("The API key is not one of this server's.")
    if wants_admin and not is_admins:
        raise ApiError(
            403,
            "This path wants a key for administration, and this is a user's.",
            code="admin_key_required",
        )


def _is_among(given: bytes, keys: tuple[bytes, ...]) -> bool:
    """Compares with every key, so that the time does not tell which one came close."""
    return bool(sum(hmac.compare_digest(given, key) for key in keys))


def _given_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key")


def _refusal(message: str) -> ApiError:
    return ApiError(
        401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    )
