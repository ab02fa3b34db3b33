"""Copies of states that the device refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache.copies.cache_copies import DeviceCache
from hicache.copies.open import open_cache_copies
from hicache.copies.rows import HostRows
from hicache.errors import HostPoolError
from workers.models.deepseek_v41.cache import states


def test_a_state_that_finds_no_memory_is_a_store_that_is_refused(monkeypatch):
    def cut_state(caches: object, slot: int, position: int, length: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("so much")

    monkeypatch.setattr(states, "cut_state", cut_state)
    codec = states.SlotStates(SimpleNamespace(), lambda slot: 128)
    rows = HostRows.of(np.zeros((2, 64), np.uint8))
    device = DeviceCache(HostRows.of(np.zeros((2, 64), np.uint8)), codec)
    copies = open_cache_copies(device, rows.memory, rows, rows, "auto")
    with pytest.raises(HostPoolError, match="so much"):
        copies.store_state(0, 128, 1)
