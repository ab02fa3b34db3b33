"""Copies of states that the device refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache.errors import HostPoolError
from workers.models.deepseek_v41.cache.cache_copies import DeepseekV41Copies


def test_a_state_that_finds_no_memory_is_a_store_that_is_refused():
    def cut_state(slot: int, position: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("so much")

    pages = torch.zeros(2, 64, dtype=torch.uint8)
    engine = SimpleNamespace(caches=SimpleNamespace(pages=pages), cut_state=cut_state)
    rows = np.zeros((2, 64), np.uint8)
    copies = DeepseekV41Copies(engine, SimpleNamespace(page_rows=rows, state_rows=rows), "auto")
    with pytest.raises(HostPoolError, match="so much"):
        copies.store_state(0, 128, 1)
