"""`csrc/page_copy.cu` compiled for this machine's GPU with NVRTC, through cuda-core."""

from __future__ import annotations

from importlib.resources import files
from types import ModuleType
from typing import Final

import torch

from hicache.copies.cuda.kernel import THREADS, KernelArguments, PairArray
from hicache.copies.cuda.kernel_cache import cached_cubin, kernel_folder
from hicache.copies.cuda.method import (
    CopyMethodMissing,
    CudaStream,
    import_package,
)
from transport.wording import first_line

KERNEL: Final = "copy_rows"
_MODULES: Final = ("cuda.core", "cuda.core.experimental")
"""The latter before cuda-core 0.5."""


def kernel_source() -> str:
    return (files("hicache") / "kernels" / "page_copy.cu").read_text(encoding="utf-8")


def compile_kernel(core: ModuleType, source: str, architecture: str) -> bytes:
    """The cubin of `source`. Needs no GPU.

    Args:
        core: `cuda.core`; its errors pass.
        source: CUDA C++.
        architecture: such as sm_90.
    """
    options = core.ProgramOptions(arch=architecture, std="c++17")
    return bytes(core.Program(source, "c++", options).compile("cubin").code)


def compiler_version() -> str:
    nvrtc = import_package("cuda.bindings.nvrtc", "cuda-bindings")
    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


def find_core() -> ModuleType:
    missing = CopyMethodMissing("the package cuda-core is missing")
    for name in _MODULES:
        try:
            core = import_package(name, "cuda-core")
        except CopyMethodMissing as error:
            missing = error
            continue
        if hasattr(core, "Program"):
            return core
    raise missing


def address_on_device(host: int) -> int:
    driver = import_package("cuda.bindings.driver", "cuda-bindings")
    status, address = driver.cuMemHostGetDevicePointer(host, 0)
    if int(status) != 0:
        raise CopyMethodMissing(f"the GPU does not see page-locked memory ({status.name})")
    return int(address)


class CompiledCopyKernel:
    """See `CopyKernel`."""

    def __init__(self, device: torch.device) -> None:
        """Compile, or load what was compiled before, for `device`, whose context is current.

        Raises:
            CopyMethodMissing: it cannot be compiled or loaded.
        """
        core = find_core()
        major, minor = torch.cuda.get_device_capability(device)
        architecture, source = f"sm_{major}{minor}", kernel_source()
        try:
            cubin = cached_cubin(
                kernel_folder(),
                source,
                architecture,
                compiler_version(),
                lambda: compile_kernel(core, source, architecture),
            )
            # torch uses the device's primary context, and so does this.
            core.Device(device.index or 0).set_current()
            self._code = core.ObjectCode.from_cubin(cubin)  # the kernel lives as long as its code
            self._kernel = self._code.get_kernel(KERNEL)
        except Exception as error:  # cuda-core's errors have no public type
            raise CopyMethodMissing(
                f"the copy kernel cannot be compiled or loaded ({first_line(error)})"
            ) from error
        self._core = core
        self._device = device

    def launch(
        self, arguments: KernelArguments, pairs: PairArray, blocks: int, stream: CudaStream
    ) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        # Both ends of this small copy belong to torch's caching allocators: the pinned one is used
        # again when the copy is over, the device's one in the order of `stream`.
        with torch.cuda.stream(stream):
            on_device = torch.from_numpy(pairs).pin_memory().to(self._device, non_blocking=True)
        self._core.launch(
            self._core.Stream.from_handle(stream.cuda_stream),
            self._core.LaunchConfig(grid=blocks, block=THREADS),
            self._kernel,
            *(int(value) for value in arguments),
            on_device.data_ptr(),
            len(pairs),
        )
