"""What a step has to copy between the device and the host pool."""

from __future__ import annotations

from typing import NamedTuple

from hicache.cache.outcomes import Hit, StorePlan
from hicache.manager.ticket import Announcement


class PrefixLoad(NamedTuple):
    """Copy a cached prefix to the device before the step: its pages into `pages`, its state into `slot`."""

    slot: int
    pages: tuple[int, ...]
    hit: Hit


class PrefixStore(NamedTuple):
    """Copy a computed prompt to the host after the step: of the block table `pages` and of the state in
    `slot`, what `plan` names."""

    slot: int
    pages: tuple[int, ...]
    plan: StorePlan
    announcement: Announcement
    """Closed once it is stored."""
