"""Numbers as a person reads them."""

from __future__ import annotations

UNKNOWN = "–"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: int | None) -> str:
    """1234567 -> 1,234,567."""
    return UNKNOWN if value is None else f"{value:,}"


def size(value: int | None) -> str:
    """Bytes: 1536 -> 1.5 KiB."""
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
    """At most two units: 0.0042 -> 4.2 ms, 75 -> 1 min 15 s."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24:02} h"


def milliseconds(value: float | None) -> str:
    """As `duration`."""
    return duration(None if value is None else value / 1000)


def percent(value: float | None) -> str:
    """41.7 -> 42 %."""
    return UNKNOWN if value is None else f"{value:.0f} %"


def rate(value: float | None) -> str:
    """Per second: three significant digits below 100."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
