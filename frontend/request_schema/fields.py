"""Typed access to the fields of a JSON object. `null` counts as absent."""

from __future__ import annotations

from typing import TypeGuard

from frontend.errors import ApiError, bad_request
from frontend.http.json_body import JsonObject


class Fields:
    """Reads one JSON object. Every method raises ApiError (400, naming the field) on a bad value."""

    def __init__(self, values: JsonObject, path: str = "") -> None:
        """`path` is where the object lies in the request, e.g. `messages[0]`."""
        self.values = values
        self._path = path

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def refuse(self, name: str, wanted: str) -> ApiError:
        """The error for a field whose value is wrong: `NAME must be WANTED.`"""
        path = self.path(name)
        return bad_request(f"{path} must be {wanted}.", path)

    def has(self, name: str) -> bool:
        """Whether the field is given and not null."""
        return self.values.get(name) is not None

    def raw(self, name: str) -> object:
        """The value as it came, None where absent."""
        return self.values.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int | None) -> int | None:
        """An integer, low <= value <= high; high None: of any size."""
        value = self.values.get(name)
        if value is None:
            return None
        if not is_integer(value) or value < low or (high is not None and value > high):
            limits = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise self.refuse(name, f"an integer {limits}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def mapping(self, name: str) -> JsonObject | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return value

    def array(self, name: str) -> list[object] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, "an array")
        return value


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_object(value: object, path: str) -> Fields:
    """Reader of an element of an array, which must be an object.

    Raises:
        ApiError: 400, it is something else.
    """
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be an object.", path)
    return Fields(value, path)
