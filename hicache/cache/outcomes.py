"""What the calls of the prefix cache return."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hicache.cache.index import PinnedPrefix
from hicache.copies.runs import IndexArray


class MissReason(StrEnum):
    """Why a lookup found nothing to load."""

    TOO_SHORT = "too short"
    """So short that all of it must be recomputed anyway."""
    NO_PREFIX = "no such prefix"
    """Nobody stored a prompt that begins like this, or it was evicted."""
    NO_STATE = "capped by missing state"
    """Pages are there, but no state at any page border of them."""


class SkipReason(StrEnum):
    """Why pages or states of a finished prefill were not stored."""

    PENDING = "too many bytes pending"
    PAGES_PINNED = "pool full of pinned pages"
    TOO_LONG = "prompt longer than the pool"
    STATES_PINNED = "all states pinned"
    """Or the pool has fewer states than a prompt."""
    PREFIX_LOST = "prefix lost meanwhile"
    """Pages before these were being stored by another plan, which failed, or were evicted since."""
    FLUSHED = "flushed meanwhile"
    COPY_FAILED = "copy failed"


@dataclass(frozen=True)
class Hit:
    """A prefix to load. It stays in the pool until `PrefixCache.release`."""

    num_tokens: int
    """A multiple of the page size; KV of these need not be computed."""
    prefix: PinnedPrefix
    """Host pages in order; a host state at its end, ABSENT where the model has none."""
    matched_tokens: int
    """As far as pages were found. Past `num_tokens`, a state was missing there."""
    serial: int

    @property
    def host_pages(self) -> IndexArray:
        return self.prefix.pages

    @property
    def host_state(self) -> int:
        return self.prefix.state


@dataclass(frozen=True)
class Miss:
    """Nothing to load."""

    reason: MissReason
    matched_tokens: int = 0
    """As far as pages were found."""


class AnchorState(NamedTuple):
    """A state to store: the engine's after the first `position` tokens goes into `host_state`."""

    position: int
    host_state: int


@dataclass(frozen=True)
class StorePlan:
    """What to copy from the device. Its host pages and states belong to it until `commit` or `abandon`."""

    blocks: IndexArray
    """Which pages of the prompt, as indexes into the sequence's block table."""
    host_pages: IndexArray
    """Where each of them goes."""
    states: tuple[AnchorState, ...]
    num_bytes: int
    keys: tuple[bytes, ...] = field(repr=False)
    """Of the prompt, up to the last page that matters here."""
    prefix: PinnedPrefix = field(repr=False)
    """What was there before and must stay for the rest to make sense."""
    stamp: int
    serial: int
