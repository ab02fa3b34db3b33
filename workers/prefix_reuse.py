"""What the scheduler does with the prefix cache: who starts from a hit, who waits for one, who stores.

Only the bookkeeping; rows are copied by whoever launches the plan (`workers/prefix_transfer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache.cache.outcomes import Announcement, Hit, StorePlan
from hicache.cache.prefix_cache import PrefixCache
from hicache.keys import PromptKeys
from workers.prefix_demand import PrefixDemand
from workers.prefix_waits import PrefixWaits
from workers.scheduling.sequence import Sequence


class PrefixReuse:
    """One rank's prefixes, as its scheduler sees them.

    A sequence comes by `enqueue`, is asked `should_wait` until it does not, and starts by `lookup` and
    `announce`. Before each chunk it gets its next checkpoint; after the chunk that ends there, and after
    the last one, it stores. `drop` ends this at any point.
    """

    def __init__(self, cache: PrefixCache, keep_tokens: int) -> None:
        """`keep_tokens` as in `CacheLayout`: a hit must not reach into the rows that the decoder
        layers run on, and those follow from the client's prompt."""
        self._cache = cache
        self._only_prompt = keep_tokens > 0
        self._waits = PrefixWaits(cache)
        self._demand = PrefixDemand()

    # ---- before it starts ---------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """The sequence waits for a slot. For models with states, those that are computed meanwhile
        leave a state where it can go on; others leave all their pages anyway."""
        sequence.wanted_keys = self._wanted_keys(sequence)
        self._demand.add(sequence.wanted_keys)

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether a prompt that is being computed now will leave a longer prefix for this one, and
        has less left to compute than this one would save by it."""
        return sequence.generate.prefix_cache and self._waits.should_wait(
            sequence, self._hit_keys(sequence)
        )

    def lookup(self, sequence: Sequence) -> Hit | None:
        """The prefix that this sequence can start from; its rows stay until it is released. The
        sequence does not wait any more."""
        self._leave_queue(sequence)
        if not sequence.generate.prefix_cache:
            return None
        found = self._cache.lookup(self._hit_keys(sequence), sequence.key[0])
        sequence.matched_tokens = found.matched_tokens
        return found if isinstance(found, Hit) else None

    def release(self, hit: Hit) -> None:
        """The hit will not be loaded."""
        self._cache.release(hit)

    # ---- while it is computed -----------------------------------------------------------------

    def announce(self, sequence: Sequence) -> None:
        """The sequence begins to compute its prompt and will store it."""
        if sequence.generate.prefix_cache:
            sequence.announcement = self._waits.open(sequence, self._store_keys(sequence))

    def choose_checkpoint(self, sequence: Sequence) -> None:
        """Choose where the next chunk must end if it gets so far, for a state to be stored there.

        It is where the beginnings of several prompts part, as after a shared system prompt: those that
        wait now, or earlier ones, whose pages go on past the last state. At the prompt's own anchors it
        leaves states anyway.
        """
        if sequence.announcement is None or sequence.checkpoint > sequence.num_computed:
            return
        anchors = self._cache.anchors(sequence.num_tokens)
        if not anchors:
            return
        page_tokens, last = self._cache.page_tokens, anchors[-1]
        keys = self._store_keys(sequence).keys[: last // page_tokens]
        wanted = self._demand.best_end(keys, sequence.num_computed // page_tokens) * page_tokens
        ends = [
            end for end in (wanted, sequence.matched_tokens) if sequence.num_computed < end < last
        ]
        sequence.checkpoint = min(ends, default=0)
        if sequence.checkpoint:
            sequence.checkpoint_announcement = self._waits.open(
                sequence, self._keys(sequence, sequence.checkpoint), (sequence.checkpoint,)
            )

    def begin_store(self, sequence: Sequence) -> tuple[StorePlan, Announcement] | None:
        """What to store of a prompt whose last chunk is in the step that is being planned, and the
        announcement to withdraw when it is stored."""
        announcement, sequence.announcement = sequence.announcement, None
        return self._begin_store(self._store_keys(sequence), announcement)

    def begin_checkpoint_store(self, sequence: Sequence) -> tuple[StorePlan, Announcement] | None:
        """What to store of a prompt whose chunk in the step that is being planned ends at its
        checkpoint, and the announcement as above."""
        announcement, sequence.checkpoint_announcement = sequence.checkpoint_announcement, None
        keys = self._keys(sequence, sequence.checkpoint)
        return self._begin_store(keys, announcement, (sequence.checkpoint,))

    def _begin_store(
        self,
        keys: PromptKeys,
        announcement: Announcement | None,
        anchors: tuple[int, ...] | None = None,
    ) -> tuple[StorePlan, Announcement] | None:
        if announcement is None:
            return None
        plan = self._cache.begin_store(keys, anchors)
        if plan is None:
            self._waits.close(announcement)
            return None
        self._waits.hand_over(announcement)
        return plan, announcement

    # ---- at the end ---------------------------------------------------------------------------

    def drop(self, sequence: Sequence) -> None:
        """The sequence is over, or starts anew. What it has stored is not touched. Idempotent."""
        self._leave_queue(sequence)
        if sequence.hit is not None:
            self._cache.release(sequence.hit)
        for announcement in (sequence.announcement, sequence.checkpoint_announcement):
            if announcement is not None:
                self._waits.close(announcement)
        sequence.hit = sequence.announcement = sequence.checkpoint_announcement = None
        sequence.checkpoint = sequence.matched_tokens = 0
        sequence.prefix_keys = None

    def _leave_queue(self, sequence: Sequence) -> None:
        self._demand.remove(sequence.wanted_keys)
        sequence.wanted_keys = ()
        sequence.wait = None

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Compare with what the scheduler has.

        Raises:
            AssertionError: something of a sequence that is over, or has started, is kept.
        """
        sequences = list(live)
        self._waits.check_integrity(sequences)
        self._demand.check_integrity(self._wanted_keys(s) for s in sequences if s.slot is None)
        for sequence in sequences:
            wanted = self._wanted_keys(sequence) if sequence.slot is None else ()
            if sequence.wanted_keys != wanted:
                raise AssertionError(f"{sequence.key} wants another prefix than it could hit")

    # ---- keys ---------------------------------------------------------------------------------

    def _wanted_keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        if not sequence.generate.prefix_cache:
            return ()
        keys = self._hit_keys(sequence)  # hashed as it comes, not many at once in a step
        return self._cache.hit_keys(keys) if self._cache.has_states else ()

    def _hit_keys(self, sequence: Sequence) -> PromptKeys:
        end = sequence.prompt_len if self._only_prompt else sequence.num_tokens
        return self._keys(sequence, end)

    def _store_keys(self, sequence: Sequence) -> PromptKeys:
        return self._keys(sequence, sequence.num_tokens)

    def _keys(self, sequence: Sequence, end: int) -> PromptKeys:
        """Keys of the first `end` tokens; all are hashed once, until the prompt is computed."""
        if sequence.prefix_keys is None:
            tokens = sequence.token_slice(0, sequence.num_tokens)
            sequence.prefix_keys = self._cache.keys(tokens, sequence.generate.cache_salt)
        if end == sequence.num_tokens:
            return sequence.prefix_keys
        return PromptKeys(end, sequence.prefix_keys.keys[: end // self._cache.page_tokens])
