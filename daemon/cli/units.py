"""Numbers as a person reads them."""

from __future__ import annotations

UNKNOWN = "–"

_LONG_UNITS = ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h"))
"""Seconds up to which a unit is used, its length in seconds, its name."""
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def size(value: int | None) -> str:
    """1536 -> 1.5 KiB"""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in _BINARY[:-1]:
        if amount < 1023.5:
            return (
                f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
            )
        amount /= 1024
    return f"{amount:.1f} {_BINARY[-1]}"


def duration(seconds: float | None) -> str:
    """0.0042 -> 4.2 ms, 5400 -> 90 min"""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        return _digits(seconds * 1000, "ms")
    for limit, length, unit in _LONG_UNITS:
        if seconds < limit:
            return _digits(seconds / length, unit)
    return _digits(seconds / 86_400, "d")


def _digits(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:,.0f} {unit}"


def milliseconds(value: float | None) -> str:
    return duration(None if value is None else value / 1000)


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} %"


def rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
