"""From the bytes of a body to a typed request."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from frontend.errors import bad_request
from frontend.http.json_bounds import check_bounds
from frontend.http.refusals import refusal

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

JsonObject = dict[str, object]

T = TypeVar("T")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode and check a request body. A byte-order mark is ignored; of a repeated key, the last value
    counts; fields that the type does not have are ignored.

    Raises:
        ApiError: 400; the body is empty, no UTF-8, no JSON, too large a structure, nested too deeply, or
            not of the type.
    """
    body = body.removeprefix(BYTE_ORDER_MARK)
    if not body.strip():
        raise bad_request("The body is empty: send a JSON object.")
    check_bounds(body)
    try:
        body.decode()  # the decoder does not look at the bytes of fields that it skips
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise refusal(error, decoder.type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON in UTF-8: {error}.") from error
    except RecursionError as error:
        raise bad_request("The body's JSON is nested too deeply.") from error
