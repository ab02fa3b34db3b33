"""Tools and how they may be chosen. Calls are not parsed out of the answer yet."""

from __future__ import annotations

import re

from frontend.errors import bad_request
from frontend.http.json_body import JsonObject
from frontend.request_schema.fields import Fields, as_object
from frontend.request_schema.limits import MAX_TOOLS

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,256}")


def read_tools(fields: Fields) -> list[JsonObject] | None:
    """The tools to show to the model, None for none.

    Raises:
        ApiError: 400, naming `tools` or `tool_choice`.
    """
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if fields.has(old):
            raise bad_request(f"{old} is not supported: use {new}.", old)
    fields.boolean("parallel_tool_calls", True)
    values = fields.array("tools") or []
    if len(values) > MAX_TOOLS:
        raise fields.refuse("tools", f"an array of at most {MAX_TOOLS} tools")
    tools: list[JsonObject] = []
    names: set[str] = set()
    for position, value in enumerate(values):
        tool = as_object(value, f"tools[{position}]")
        names.add(_check_tool(tool))
        tools.append(tool.values)
    wants_none = _read_choice(fields, names)
    return None if wants_none or not tools else tools


def _check_tool(tool: Fields) -> str:
    if tool.raw("type") != "function":
        raise tool.refuse("type", '"function"')
    function = tool.mapping("function")
    if function is None:
        raise tool.refuse("function", "an object")
    inner = Fields(function, tool.path("function"))
    name = inner.string("name")
    if name is None or not _NAME.fullmatch(name):
        raise inner.refuse("name", "a name of letters, digits, '_', '.', ':' and '-'")
    inner.string("description")
    inner.mapping("parameters")
    inner.boolean("strict")
    return name


def _read_choice(fields: Fields, names: set[str]) -> bool:
    """Check `tool_choice`; returns whether no tool may be called."""
    choice = fields.raw("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return choice == "none"
    wanted = _named_choice(fields, choice)
    if not names:
        raise bad_request("tool_choice demands a tool, but tools is empty.", "tool_choice")
    if wanted is not None and wanted not in names:
        raise bad_request(
            f"tool_choice names {wanted[:100]!r}, which is not in tools.", "tool_choice"
        )
    raise bad_request(
        'tool_choice that demands a call is not supported yet: use "auto" or "none".', "tool_choice"
    )


def _named_choice(fields: Fields, choice: object) -> str | None:
    if choice == "required":
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            return name
    raise fields.refuse(
        "tool_choice",
        '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
    )
