"""The error that a client sees: an OpenAI error object with the right status."""

from __future__ import annotations

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request is answered with an error instead of a result."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """`retry_after` is in seconds."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = headers

    @property
    def type(self) -> str:
        """The kind of error, as the OpenAI API spells it."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "api_error")

    def value(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(self.value())

    def all_headers(self) -> list[tuple[bytes, bytes]]:
        headers = list(self.headers)
        if self.retry_after is not None:
            headers.append((b"retry-after", str(self.retry_after).encode()))
        return headers


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be served as it is: 400."""
    return ApiError(400, message, param=param, code=code)
