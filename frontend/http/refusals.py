"""From msgspec's complaint about a body to an error that names the field and says what it must be.

The sentence is made from the field's declared type, so that a type and its limits are written once.
`Meta(description=...)` replaces the words for a type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec
from msgspec import inspect

from frontend.errors import ApiError, bad_request

_AT: Final = re.compile(r"(.*) - at `(key` in `)?\$(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_INVALID: Final = re.compile(r"Invalid value '(.*)'", re.DOTALL)
_STEP: Final = re.compile(r"\.(\w+)|\[(?:\d+|\.\.\.)\]")

_type_info = lru_cache(inspect.type_info)


def refusal(error: msgspec.ValidationError, expected: object, prefix: str = "") -> ApiError:
    """The 400 for a value that is not of the type `expected`. `prefix` is where in the body it lies."""
    found = _AT.fullmatch(str(error))
    complaint, in_key, path = found.groups() if found else (str(error), None, "")
    missing = _MISSING.fullmatch(complaint)
    if missing:
        path += f".{missing[1]}"
    elif not path and not prefix:
        return bad_request("The body must be a JSON object.")
    # What lies in an object of the client's keys has no path: the object is named.
    param = (prefix + path.partition("[...]")[0]).removeprefix(".")
    wanted = _follow(_type_info(expected), path)
    invalid = _INVALID.fullmatch(complaint)
    if invalid and f'"{invalid[1]}"' in _words(wanted):
        return bad_request(f"{param} is given twice, with different values.", param)
    if in_key:
        wanted = next(t.key_type for t in _members(wanted) if isinstance(t, inspect.DictType))
        subject = f"A key of {param}"
    elif "[...]" in path:
        subject = f"A value of {param}"
    else:
        subject = f"{param} is missing: it" if missing else param
    return bad_request(f"{subject} must be {_words(wanted)}.", param)


def _members(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The alternatives of a union, flat; null is left out, for it stands for an absent field."""
    if isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from _members(member)
    elif isinstance(kind, inspect.Metadata):
        yield from _members(kind.type)
    elif not isinstance(kind, inspect.NoneType):
        yield kind


def _follow(kind: inspect.Type, path: str) -> inspect.Type:
    """The type at `path`, e.g. `.messages[0].content`."""
    for step in _STEP.finditer(path):
        name = step[1]
        kind = _field(kind, name) if name else _element(kind)
    return kind


def _field(kind: inspect.Type, name: str) -> inspect.Type:
    structs = [t for t in _members(kind) if isinstance(t, inspect.StructType)]
    if structs[0].tag_field == name:
        return inspect.LiteralType(tuple(struct.tag for struct in structs))
    return next(f.type for struct in structs for f in struct.fields if f.encode_name == name)


def _element(kind: inspect.Type) -> inspect.Type:
    for member in _members(kind):
        if isinstance(member, inspect.ListType):
            return member.item_type
        if isinstance(member, inspect.DictType):
            return member.value_type
    return inspect.AnyType()


def _words(kind: inspect.Type) -> str:
    described = _description(kind)
    if described:
        return described
    return _one_of(list(dict.fromkeys(map(_plain_words, _members(kind)))))


def _description(kind: inspect.Type) -> str | None:
    if isinstance(kind, inspect.Metadata):
        return (kind.extra_json_schema or {}).get("description")
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, map(_description, kind.types)), None)
    return None


def _one_of(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _plain_words(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(ge=low, le=high):
            return f"an integer{_range(low, high)}"
        case inspect.FloatType(gt=above, ge=low, le=high):
            if above is not None:
                return f"a number greater than {above:g} and at most {high:g}"
            return f"a number{_range(low, high)}"
        case inspect.StrType(min_length=low, max_length=high):
            empty = "a non-empty string" if low else "a string"
            return empty if high is None else f"{empty} of at most {high} characters"
        case inspect.ListType(min_length=low, max_length=high):
            empty = "a non-empty array" if low else "an array"
            return empty if high is None else f"{empty} of at most {high} items"
        case inspect.LiteralType(values=values):
            return _one_of([f'"{value}"' for value in values])
        case inspect.DictType(max_length=int(high)):
            return f"an object of at most {high} entries"
        case inspect.StructType() | inspect.DictType():
            return "an object"
    # Of values that nobody types, only numbers are refused.
    return "a number that fits into 64 bits"


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "" if low is None else f" of at least {low:g}"
    return f" from {low:g} to {high:g}" if abs(high) < 1e6 else f" from {low} to {high}"
