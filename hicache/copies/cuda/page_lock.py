"""Host memory made ready for a GPU."""

from __future__ import annotations

from typing import Final

import torch

from hicache.copies.rows import RowArray
from hicache.errors import HostPoolError

_REGISTER_FLAGS: Final = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: the kernel reads and writes the memory itself."""


class PageLock:
    """Memory that stays page-locked for as long as this object is open."""

    def __init__(self, memory: RowArray) -> None:
        self._address = int(memory.ctypes.data)
        self._driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = self._driver.cudaHostRegister(self._address, memory.nbytes, _REGISTER_FLAGS)
        if int(status) != 0:
            raise HostPoolError(
                f"The host prefix cache cannot be page-locked for the GPU (CUDA error {int(status)}): "
                "raise the limit on locked memory (ulimit -l), or lower --hicache-size-gb."
            )

    def close(self) -> None:
        self._driver.cudaHostUnregister(self._address)
