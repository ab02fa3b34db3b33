"""What the scheduler does with the prefix cache: who starts from a hit, who waits for one, who stores.

Only the bookkeeping; rows are copied by whoever launches the plan (`workers/prefix_transfer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.keys import PromptKeys
from hicache.outcomes import Announcement, Hit, StorePlan
from hicache.prefix_cache import PrefixCache
from workers.sequence import Sequence


class PrefixReuse:
    """One rank's prefixes, as its scheduler sees them."""

    def __init__(self, cache: PrefixCache, keep_tokens: int) -> None:
        """`keep_tokens` as in `CacheLayout`: a hit must not reach into the rows that the decoder
        layers run on, and those follow from the client's prompt."""
        self._cache = cache
        self._only_prompt = keep_tokens > 0

    def should_wait(self, sequence: Sequence, computing: Iterable[Sequence]) -> bool:
        """Whether a prompt that is being computed now will leave a longer prefix for this one, and
        has less left to compute than this one would save by it."""
        if not sequence.uses_prefix_cache:
            return False
        keys = self._hit_keys(sequence)
        announced = self._cache.longest_announced(keys)
        gain = announced - self._cache.findable_tokens(keys) if announced else 0
        if gain <= 0:
            return False
        key = keys.keys[announced // self._cache.page_tokens - 1]
        left = [
            other.num_tokens - other.num_computed
            for other in computing
            if other.announcement is not None and key in other.announcement.keys
        ]
        # Nobody computes it: it is computed and on its way into the cache.
        return min(left, default=0) <= gain

    def lookup(self, sequence: Sequence) -> Hit | None:
        """The prefix that this sequence can start from; its rows stay until it is released.

        Where pages go on past the last state, the sequence gets a checkpoint at their end: this is
        where the beginnings of several prompts part, as after a shared system prompt.
        """
        if not sequence.uses_prefix_cache:
            return None
        found = self._cache.lookup(self._hit_keys(sequence), sequence.key[0])
        hit = found if isinstance(found, Hit) else None
        reached = 0 if hit is None else hit.num_tokens
        sequence.checkpoint = found.matched_tokens if found.matched_tokens > reached else 0
        return hit

    def release(self, hit: Hit) -> None:
        """The hit will not be loaded."""
        self._cache.release(hit)

    def announce(self, sequence: Sequence) -> None:
        """The sequence begins to compute its prompt and will store it."""
        if sequence.uses_prefix_cache:
            sequence.announcement = self._cache.announce(self._store_keys(sequence))

    def drop(self, sequence: Sequence) -> None:
        """The sequence stops before its prompt is computed, or has stored it. Idempotent."""
        if sequence.hit is not None:
            self._cache.release(sequence.hit)
            sequence.hit = None
        if sequence.announcement is not None:
            self._cache.withdraw(sequence.announcement)
            sequence.announcement = None

    def begin_store(self, sequence: Sequence) -> tuple[StorePlan, Announcement] | None:
        """What to store of a prompt whose last chunk is in the step that is being planned, and the
        announcement to withdraw when it is stored."""
        if sequence.announcement is None:
            return None
        plan = self._cache.begin_store(self._store_keys(sequence))
        if plan is None:
            self.drop(sequence)
            return None
        announcement, sequence.announcement = sequence.announcement, None
        return plan, announcement

    def begin_checkpoint_store(self, sequence: Sequence) -> tuple[StorePlan, Announcement] | None:
        """What to store of a prompt whose chunk in the step that is being planned ends at its
        checkpoint."""
        position, sequence.checkpoint = sequence.checkpoint, 0
        keys = self._keys(sequence, position)
        plan = self._cache.begin_store(keys, anchors=(position,))
        return None if plan is None else (plan, self._cache.announce(keys, anchors=(position,)))

    def _hit_keys(self, sequence: Sequence) -> PromptKeys:
        end = sequence.prompt_len if self._only_prompt else sequence.num_tokens
        return self._keys(sequence, end)

    def _store_keys(self, sequence: Sequence) -> PromptKeys:
        return self._keys(sequence, sequence.num_tokens)

    def _keys(self, sequence: Sequence, end: int) -> PromptKeys:
        """Keys of the first `end` tokens; all are hashed once, while the sequence waits."""
        if sequence.prefix_keys is None:
            tokens = sequence.token_slice(0, sequence.num_tokens)
            sequence.prefix_keys = self._cache.keys(tokens, sequence.cache_salt)
        if end == sequence.num_tokens:
            return sequence.prefix_keys
        return PromptKeys(end, sequence.prefix_keys.keys[: end // self._cache.page_tokens])
