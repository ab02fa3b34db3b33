"""How full something is, as a bar and as numbers."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from daemon.cli.units import UNKNOWN

BAR_CELLS: Final = 14
_PARTS: Final = " ▏▎▍▌▋▊▉█"


def usage_bar(ratio: float | None) -> Text:
    if ratio is None:
        return Text("not loaded yet", "dim")
    eighths = round(min(max(ratio, 0.0), 1.0) * BAR_CELLS * 8)
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (_PARTS[rest] if rest else "")
    style = "green" if ratio < 0.7 else "yellow" if ratio < 0.9 else "red"
    return Text.assemble((bar.ljust(BAR_CELLS, "·"), style), f" {100 * ratio:3.0f} %")


def part_of(used: int | None, total: int | None) -> str:
    if used is None or total is None:
        return UNKNOWN
    return f"{used:,} / {total:,}"
