"""How many pages the pool gets, and whether the longest sequence fits into it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from transport.wording import GIB
from workers.contract import ModelLoadError

_log = logging.getLogger(__name__)

_HOST_SHARE: Final = 0.20
"""Share of the available memory that an unplanned pool may take on a CPU."""


@dataclass(frozen=True)
class PoolPlan:
    """Size of the page pool, and the context length that it allows."""

    num_pages: int
    max_model_len: int


def pages_for(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def host_pool_bytes(available: int, wanted: int) -> int:
    return min(wanted, int(available * _HOST_SHARE))


def plan_pool(
    budget_bytes: int, page_bytes: int, page_tokens: int, max_model_len: int, max_num_seqs: int
) -> PoolPlan:
    """Fit pages into the budget, but no more than `max_num_seqs` full sequences can use.

    The pool always holds one sequence of `max_model_len` tokens. Where the budget is too small for that,
    the length is reduced with a warning.

    Raises:
        ModelLoadError: the budget does not hold even one page.
    """
    fitting = budget_bytes // page_bytes
    if fitting < 1:
        raise ModelLoadError(
            f"The KV cache got {budget_bytes / GIB:.3f} GiB, but one page of {page_tokens} tokens "
            f"takes {page_bytes / GIB:.3f} GiB; free memory or raise the size of the KV cache."
        )
    num_pages = min(fitting, max_num_seqs * pages_for(max_model_len, page_tokens))
    reachable = num_pages * page_tokens
    if reachable < max_model_len:
        _log.warning(
            "The KV cache holds %d tokens: the maximum context length is reduced from %d to %d.",
            reachable,
            max_model_len,
            reachable,
        )
        max_model_len = reachable
    return PoolPlan(num_pages, max_model_len)
