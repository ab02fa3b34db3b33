"""What waiting prompts have in common: where one that is being computed should leave a state for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PrefixDemand:
    """How many waiting prompts begin with a prefix, by the key of its last page.

    Equal keys mean equal beginnings, so along a chain of keys the numbers only fall. All calls are
    O(pages) of one prompt, however many wait.
    """

    def __init__(self) -> None:
        self._waiting: Counter[bytes] = Counter()

    def add(self, keys: Sequence[bytes]) -> None:
        self._waiting.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._waiting[key] > 1:
                self._waiting[key] -= 1
            else:
                del self._waiting[key]

    def best_end(self, keys: Sequence[bytes], first: int) -> int:
        """After which page of the chain `keys` a state would save most, 0: after none.

        It is where some that wait leave the chain: pages since `first`, where the computation is now,
        times prompts that go at least that far. Taking the best first keeps the ends few, about the
        logarithm of the prompts that wait, even if each leaves the chain at another page.
        """
        best = most_saved = 0
        waiting = self._waiting.get(keys[first], 0) if first < len(keys) else 0
        for end in range(first + 1, len(keys)):
            if not waiting:
                break
            going_on = self._waiting.get(keys[end], 0)
            if going_on < waiting and waiting * (end - first) > most_saved:
                best, most_saved = end, waiting * (end - first)
            waiting = going_on
        return best

    def check_integrity(self, waiting: Iterable[Sequence[bytes]]) -> None:
        if self._waiting != Counter(key for keys in waiting for key in keys):
            raise AssertionError("the prompts that wait are counted wrongly")
