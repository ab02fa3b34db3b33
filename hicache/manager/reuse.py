"""What the scheduler does with the prefix cache: who starts from a hit, who waits for one, who stores.

Only the bookkeeping; whoever launches the step copies the rows (`hicache/manager/transfers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hicache.cache.outcomes import Hit
from hicache.cache.prefix_cache import PrefixCache
from hicache.keys import PromptKeys
from hicache.manager.demand import PrefixDemand
from hicache.manager.prefills import Prefills
from hicache.manager.step_copies import PrefixLoad, PrefixStore
from hicache.manager.ticket import PrefixTicket
from transport.framing import TokenArray


class PrefixReuse:
    """The prefixes of one rank's sequences.

    A sequence comes by `enqueue` and is asked `should_wait` until it need not; then it is started. For
    each chunk, `end_chunk` says how far it may go and `advance` how far it goes; once it is sure to run,
    `begin_load` and `begin_store` say what to copy with it. `drop` ends this at any point.
    """

    def __init__(self, cache: PrefixCache, prefills: Prefills, keep_tokens: int) -> None:
        """`keep_tokens` as in `CacheLayout`: a hit must not reach into the rows that the decoder
        layers run on, and those follow from the client's prompt."""
        self._cache = cache
        self._only_prompt = keep_tokens > 0
        self._prefills = prefills
        self._demand = PrefixDemand()

    # ---- before it starts ---------------------------------------------------------------------

    def enqueue(self, ticket: PrefixTicket, tokens: TokenArray) -> None:
        """A sequence with these tokens waits for a slot. For models with states, prompts that are
        computed meanwhile leave a state where it can go on; others leave all their pages anyway."""
        if not ticket.enabled:
            return
        # Hashed as they come, not many at once in a step.
        ticket.keys = ticket.hit_keys = self._cache.keys(tokens, ticket.salt)
        if self._only_prompt:
            ticket.hit_keys = self._beginning(ticket.keys, ticket.prompt_len)
        ticket.wanted_keys = self._wanted_keys(ticket)
        self._demand.add(ticket.wanted_keys)

    def should_wait(self, ticket: PrefixTicket) -> bool:
        return self._prefills.should_wait(ticket)

    def start(self, ticket: PrefixTicket, make_room: Callable[[int], bool]) -> int:
        """Begin to compute the sequence, which waits no more; returns how many tokens its hit has.

        Args:
            ticket: queued.
            make_room: gets pages for the first tokens of the sequence; False: there are not enough.
        """
        self._leave_queue(ticket)
        ticket.cached_tokens = ticket.num_computed = 0
        if ticket.keys is None or ticket.hit_keys is None:
            return 0
        found = self._cache.lookup(ticket.hit_keys, ticket.request_id)
        ticket.matched_tokens = found.matched_tokens
        if isinstance(found, Hit):
            if make_room(found.num_tokens):
                ticket.hit = found
                ticket.cached_tokens = ticket.num_computed = found.num_tokens
            else:
                self._cache.release(found)
        ticket.announcement = self._prefills.open(ticket, ticket.keys)
        return ticket.num_computed

    # ---- while it is computed -----------------------------------------------------------------

    def end_chunk(self, ticket: PrefixTicket, stop: int) -> int:
        self._choose_state_cut(ticket)
        return ticket.state_cut if ticket.num_computed < ticket.state_cut < stop else stop

    def _choose_state_cut(self, ticket: PrefixTicket) -> None:
        """Choose where a chunk must end next, for a state to be stored there.

        It is where the beginnings of several prompts part, as after a shared system prompt: those that
        wait now, or earlier ones, whose pages go on past the last state. At the prompt's own anchors it
        leaves states anyway.
        """
        computed, keys = ticket.num_computed, ticket.keys
        if ticket.announcement is None or keys is None or ticket.state_cut > computed:
            return
        anchors = self._cache.stores.anchors(keys.num_tokens)
        if not anchors:
            return
        page_tokens, last = self._cache.page_tokens, anchors[-1]
        chain = keys.keys[: last // page_tokens]
        wanted = self._demand.best_end(chain, computed // page_tokens) * page_tokens
        cuts = [cut for cut in (wanted, ticket.matched_tokens) if computed < cut < last]
        ticket.state_cut = min(cuts, default=0)
        if ticket.state_cut:
            beginning = self._beginning(keys, ticket.state_cut)
            ticket.cut_announcement = self._prefills.open(ticket, beginning, (ticket.state_cut,))

    def begin_load(
        self, ticket: PrefixTicket, slot: int, pages: tuple[int, ...]
    ) -> PrefixLoad | None:
        """What to load before the chunk that is being planned. `pages` is the whole block table."""
        hit, ticket.hit = ticket.hit, None
        if hit is None:
            return None
        return PrefixLoad(slot, pages[: hit.num_tokens // self._cache.page_tokens], hit)

    def advance(self, ticket: PrefixTicket, num_computed: int) -> None:
        """A chunk is filled that ends there; or it was dropped, and the one before it ended there."""
        ticket.num_computed = num_computed

    def begin_store(
        self, ticket: PrefixTicket, slot: int, pages: tuple[int, ...]
    ) -> PrefixStore | None:
        """What to store after the chunk that is being planned: something if it ends at the state cut or
        at the end of the prompt."""
        stop, keys, anchors = ticket.num_computed, ticket.keys, None
        if keys is None or stop not in (ticket.state_cut, keys.num_tokens):
            return None
        if stop == ticket.state_cut:
            announcement, ticket.cut_announcement = ticket.cut_announcement, None
            keys, anchors = self._beginning(keys, stop), (stop,)
        else:
            announcement, ticket.announcement = ticket.announcement, None
            ticket.keys = ticket.hit_keys = None
        assert announcement is not None
        announcement.leader = None
        plan = self._cache.stores.begin(keys, anchors)
        if plan is None:
            self._prefills.close(announcement)
            return None
        return PrefixStore(slot, pages, plan, announcement)

    # ---- at the end ---------------------------------------------------------------------------

    def drop(self, ticket: PrefixTicket) -> None:
        """The sequence is over, or starts anew. What it has stored is not touched. Idempotent."""
        self._leave_queue(ticket)
        if ticket.hit is not None:
            self._cache.release(ticket.hit)
        for announcement in (ticket.announcement, ticket.cut_announcement):
            if announcement is not None:
                self._prefills.close(announcement)
        ticket.hit = ticket.announcement = ticket.cut_announcement = None
        ticket.num_computed = ticket.state_cut = ticket.matched_tokens = 0
        ticket.keys = ticket.hit_keys = None

    def _leave_queue(self, ticket: PrefixTicket) -> None:
        self._demand.remove(ticket.wanted_keys)
        ticket.wanted_keys = ()
        ticket.wait = None

    def check_integrity(
        self, queued: Iterable[PrefixTicket], started: Iterable[PrefixTicket]
    ) -> None:
        waiting, computed = list(queued), list(started)
        self._prefills.check_integrity([*waiting, *computed])
        wanted = [self._wanted_keys(ticket) for ticket in waiting]
        self._demand.check_integrity(wanted)
        if [ticket.wanted_keys for ticket in waiting] != wanted or any(
            ticket.wanted_keys for ticket in computed
        ):
            raise AssertionError("a sequence wants another prefix than it could hit")

    # ---- keys ---------------------------------------------------------------------------------

    def _wanted_keys(self, ticket: PrefixTicket) -> tuple[bytes, ...]:
        if ticket.hit_keys is None or not self._cache.has_states:
            return ()
        return self._cache.hit_keys(ticket.hit_keys)

    def _beginning(self, prompt: PromptKeys, end: int) -> PromptKeys:
        return PromptKeys(end, prompt.keys[: end // self._cache.page_tokens])
