"""`response_format`: so far text alone; the rest is refused by name."""

from __future__ import annotations

from frontend.errors import bad_request
from frontend.request_schema.fields import Fields


def check_response_format(fields: Fields) -> None:
    """Let plain text pass.

    Raises:
        ApiError: 400, naming `response_format`.
    """
    value = fields.mapping("response_format")
    if value is None:
        return
    inner = Fields(value, "response_format")
    kind = inner.string("type")
    if kind == "text":
        return
    if kind == "json_schema":
        _check_schema(inner)
    elif kind != "json_object":
        raise inner.refuse("type", '"text", "json_object" or "json_schema"')
    raise bad_request(
        f"response_format of type {kind} is not supported yet: use text.", "response_format"
    )


def _check_schema(fields: Fields) -> None:
    described = fields.mapping("json_schema")
    if described is None:
        raise fields.refuse("json_schema", "an object")
    inner = Fields(described, "response_format.json_schema")
    if not isinstance(inner.raw("schema"), dict | bool):
        raise inner.refuse("schema", "a JSON schema")
