"""Whether what killed a child was the kernel, for lack of memory."""

from __future__ import annotations

from workers.hardware.host_memory import oom_kills


class MemoryWatch:
    """Remembers how often the kernel had killed for memory when it was last asked."""

    def __init__(self) -> None:
        self._seen = oom_kills().total

    def explain(self) -> str:
        """How we know, and what to do, if memory is to blame for children that have just been found
        killed; else empty.

        It is wrong of one that a person has killed after the kernel had killed the fork of a tokenizer.
        """
        count, source = oom_kills()
        is_new, self._seen = count > self._seen, count
        if not is_new:
            return ""
        return (
            f"{source} says oom_kill {count}: raise the memory limit, or lower --hicache-size-gb, "
            "--kv-cache-gb or --dp"
        )
