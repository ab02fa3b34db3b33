"""What one sequence has to do with the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.cache.outcomes import Hit
from hicache.keys import PromptKeys
from transport.ids import RequestId


@dataclass(eq=False)
class Announcement:
    """A prompt, or its beginning, that is being computed and will be stored."""

    keys: tuple[bytes, ...] = field(repr=False)
    """Keys of the positions where a hit will be possible."""
    end: int
    """Tokens up to its end."""
    leader: PrefixTicket | None = field(repr=False)
    """Who computes it. None: all of it is computed, and on its way into the cache."""


@dataclass
class PrefixWait:
    """A sequence waits for what another one computes."""

    announcement: Announcement
    gain: int
    """Tokens that it saves by waiting."""
    seen: int
    """Tokens that the other one had computed when it was last looked at."""


@dataclass(eq=False)
class PrefixTicket:
    """A sequence as the cache manager knows it. Made with the sequence, written by the manager alone.

    It is queued (`keys` are there, it may `wait`), then computed in chunks (announced, with a `hit`
    until its first chunk is planned), and stored with its last chunk; a preempted sequence is queued
    again, with the tokens that it has by then.
    """

    request_id: RequestId
    prompt_len: int
    """Tokens that came from the client."""
    enabled: bool = True
    """Whether the sequence may be loaded from the cache and stored in it."""
    salt: str = ""
    cached_tokens: int = 0
    """Tokens that its latest start took from the cache."""
    num_computed: int = 0
    """Tokens that its hit and its planned chunks cover, until its prompt is computed."""
    keys: PromptKeys | None = None
    """Keys of all its tokens, until its prompt is computed."""
    hit_keys: PromptKeys | None = None
    """Keys of those tokens that it may load, likewise."""
    wanted_keys: tuple[bytes, ...] = ()
    """While it is queued: keys of the pages that it would rather load than compute."""
    wait: PrefixWait | None = None
    """What keeps it from starting."""
    hit: Hit | None = None
    """What its first chunk starts from, until that is planned."""
    matched_tokens: int = 0
    """Tokens that had pages in the cache when it started, with a state or without."""
    announcement: Announcement | None = None
    """To all who begin like it, while its prompt is being computed."""
    state_cut: int = 0
    """Where a chunk must end, so that the state there can be stored and others go on from there.
    Not beyond `num_computed`: nowhere."""
    cut_announcement: Announcement | None = None
    """The same for its beginning, while the cut is ahead."""
