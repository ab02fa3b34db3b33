"""From the bytes of a body to a JSON object."""

from __future__ import annotations

import msgspec

from frontend.errors import bad_request

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

JsonObject = dict[str, object]


def parse_json_object(body: bytes) -> JsonObject:
    """Decode a request body. A byte-order mark is ignored; of a repeated key, the last value counts.

    Raises:
        ApiError: 400; the body is empty, no UTF-8, no JSON, nested too deeply or no object.
    """
    body = body.removeprefix(BYTE_ORDER_MARK)
    if not body.strip():
        raise bad_request("The body is empty: send a JSON object.")
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise bad_request(f"The body is not valid JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise bad_request("The body's JSON is nested too deeply.") from error
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    return value
