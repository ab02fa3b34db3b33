"""The copy kernel without a GPU: its arithmetic on a CPU, and whether CUDA's compiler takes it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.copies.cuda.compile import (
    KERNEL,
    compile_kernel,
    compiler_version,
    find_core,
    kernel_source,
)
from hicache.copies.cuda.kernel import (
    BLOCKS,
    MAX_PIECE_BYTES,
    KernelCopy,
    cut_row,
    try_copy_kernel,
)
from hicache.copies.cuda.kernel_cache import cached_cubin, kernel_folder
from hicache.copies.cuda.method import CopyMethodMissing, RowPair, import_package
from hicache.copies.rows import HostRows, Rows
from hicache.copies.runs import merge_runs
from hicache.errors import HostPoolError

NUM_ARGUMENTS = 9


def aligned(shape: tuple[int, int]) -> np.ndarray:
    """uint8 whose first byte has an address that is a multiple of 16."""
    memory = np.zeros(shape[0] * shape[1] + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + shape[0] * shape[1]].reshape(shape)


class CpuKernel:
    """Runs the kernel, compiled for the CPU, at once."""

    def __init__(self, function: Callable[..., None], blocks: int, threads: int) -> None:
        self._function = function
        self._grid = (blocks, threads)
        self.wanted_blocks: list[int] = []

    def launch(self, arguments, pairs, blocks, stream) -> None:
        self.wanted_blocks.append(blocks)
        assert pairs.dtype == np.int32 and pairs.flags.c_contiguous
        values = (*arguments, pairs.ctypes.data, len(pairs))
        assert len(values) == NUM_ARGUMENTS
        self._function(*self._grid, *(ctypes.c_uint64(value) for value in values))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory) -> Callable[..., None]:
    """run(blocks, threads, *arguments of copy_rows)."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    names = ", ".join(f"a{i}" for i in range(NUM_ARGUMENTS))
    parameters = ", ".join(f"u64 a{i}" for i in range(NUM_ARGUMENTS))
    program = f"""
    #include "{Path(__file__).with_name("cuda_on_cpu.h")}"
    {kernel_source()}
    extern "C" void run(unsigned blocks, unsigned threads, {parameters}) {{
        gridDim.x = blocks;
        blockDim.x = threads;
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
                {KERNEL}({names});
    }}"""
    (folder / "kernel.cc").write_text(program)
    library = folder / "kernel.so"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined",
         "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC",
         "-o", library, folder / "kernel.cc"],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library)).run


@given(
    device_rows=st.permutations(range(9)),
    host_rows=st.permutations(range(7)),
    count=st.integers(1, 7),
    vectors=st.sampled_from([1, 3, 4, 127, 4096, 4097, 7128, 12_300]),
    gap=st.sampled_from([0, 16, 4096]),
    blocks=st.integers(1, 5),
    threads=st.sampled_from([1, 5, 32]),
    direction=st.sampled_from(["load", "store"]),
)
def test_the_kernel_copies_the_rows_alone(
    on_cpu, device_rows, host_rows, count, vectors, gap, blocks, threads, direction
):
    """Rows of many lengths, neighbours or not, on device rows with gaps or without."""
    row_bytes = vectors * 16
    draw = np.random.default_rng(vectors)
    device, host = aligned((9, row_bytes + gap)), aligned((7, row_bytes))
    device[:] = draw.integers(0, 256, device.shape, np.uint8)
    host[:] = draw.integers(0, 256, host.shape, np.uint8)
    kernel = CpuKernel(on_cpu, blocks, threads)
    copy = KernelCopy(RowPair(HostRows.of(device[:, :row_bytes]), HostRows.of(host)), kernel)
    on_device, on_host = np.array(device_rows[:count]), np.array(host_rows[:count])
    wanted_device, wanted_host = device.copy(), host.copy()
    if direction == "load":
        wanted_device[on_device, :row_bytes] = host[on_host]
    else:
        wanted_host[on_host] = device[on_device, :row_bytes]
    runs = merge_runs(on_device.astype(np.int32), on_host.astype(np.int32))
    copy.start(direction, runs, None)
    assert kernel.wanted_blocks == [BLOCKS[direction]]
    np.testing.assert_array_equal(device, wanted_device)
    np.testing.assert_array_equal(host, wanted_host)


@given(st.integers(1, 1 << 24))
def test_pieces_cover_a_row_and_are_nearly_equal(vectors):
    row_bytes = vectors * 16
    piece_bytes, pieces = cut_row(row_bytes)
    assert piece_bytes % 16 == 0
    assert 0 < piece_bytes <= MAX_PIECE_BYTES
    last = row_bytes - (pieces - 1) * piece_bytes
    assert piece_bytes - 16 * pieces <= last <= piece_bytes
    assert last > 0


@pytest.mark.parametrize("place", range(4))
def test_rows_off_the_vectors_are_refused(place):
    """By the address of either side, the distance between rows, or their length."""
    here, pitch, there, row_bytes = (4096 + 8 * (number == place) for number in range(4))
    rows = RowPair(Rows(here, pitch, row_bytes, 9), Rows(there, row_bytes, row_bytes, 9))
    with pytest.raises(CopyMethodMissing, match="16-byte vectors"):
        KernelCopy(rows, CpuKernel(print, 1, 1))


def test_the_trial_copies_sixteen_bytes_to_those_behind_them(on_cpu):
    memory = aligned((2, 16))
    memory[:] = np.arange(32).reshape(2, 16)
    try_copy_kernel(CpuKernel(on_cpu, 16, 512), memory.ctypes.data, None)
    assert memory.ravel().tolist() == 2 * list(range(16))


class RefusedKernel:
    def launch(self, arguments, pairs, blocks, stream) -> None:
        raise ValueError("no such launch\nsee the manual")


def test_a_kernel_that_cannot_be_launched_is_found_out_by_it():
    with pytest.raises(CopyMethodMissing, match=r"\(no such launch\)$"):
        try_copy_kernel(RefusedKernel(), 4096, None)


def test_a_refused_launch_is_one_sentence_for_the_user():
    """And of the type that a worker knows: its prompt is served without being stored."""
    copy = KernelCopy(RowPair(Rows(4096, 16, 16, 9), Rows(8192, 16, 16, 9)), RefusedKernel())
    rows = np.arange(3, dtype=np.int32)
    with pytest.raises(
        HostPoolError, match=r"should store 3 rows .*\(no such launch\).*copy batch"
    ):
        copy.start("store", merge_runs(rows, rows), None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("ModuleNotFoundError('No module named x')", "the package cuda-x is missing"),
        ("ImportError('needs CUDA 13')", r"cuda-x cannot be imported \(needs CUDA 13\)"),
        ("RuntimeError('no libcuda.so.1')", r"cuda-x cannot be imported \(no libcuda.so.1\)"),
        ("AttributeError()", r"cuda-x cannot be imported \(AttributeError\)"),
    ],
)
def test_a_package_that_does_not_fit_is_as_good_as_none(tmp_path, monkeypatch, error, words):
    (tmp_path / "does_not_fit.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CopyMethodMissing, match=words):
        import_package("does_not_fit", "cuda-x")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_cudas_compiler_takes_the_source(architecture):
    try:
        core = find_core()
    except CopyMethodMissing as error:
        pytest.skip(str(error))
    assert compiler_version().startswith("nvrtc ")
    cubin = compile_kernel(core, kernel_source(), architecture)
    assert cubin.startswith(b"\x7fELF")
    assert KERNEL.encode() in cubin


def test_a_launch_takes_the_arguments_that_the_source_names():
    """cuda-core passes a Python int as 64 bits: every parameter must have that width."""
    head = kernel_source().split(f"\n{KERNEL}(")[1].split("\n{")[0]
    code = " ".join(line.split("//")[0] for line in head.splitlines())
    assert code.count("u64 ") == NUM_ARGUMENTS
    assert code.count(",") == NUM_ARGUMENTS - 1


class Compiler:
    def __init__(self, cubin: bytes = b"\x7fELF...") -> None:
        self.cubin = cubin
        self.runs = 0

    def __call__(self) -> bytes:
        self.runs += 1
        return self.cubin


KEY = ("source", "sm_90", "nvrtc 13.0")


def test_a_kernel_is_compiled_once(tmp_path):
    compiler, folder = Compiler(), tmp_path / "made" / "when missing"
    for _ in range(3):
        assert cached_cubin(folder, *KEY, compiler) == compiler.cubin
    assert compiler.runs == 1
    assert len(list(folder.iterdir())) == 1, "nothing else stays behind"


@pytest.mark.parametrize("changed", range(3))
def test_another_source_architecture_or_compiler_is_another_kernel(tmp_path, changed):
    cached_cubin(tmp_path, *KEY, Compiler(b"first"))
    key = [part + "!" if place == changed else part for place, part in enumerate(KEY)]
    assert cached_cubin(tmp_path, *key, Compiler(b"second")) == b"second"
    assert cached_cubin(tmp_path, *KEY, Compiler(b"third")) == b"first"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_compiled_anew(tmp_path, damage, caplog):
    compiler = Compiler(b"\x7fELF" + bytes(100))
    cached_cubin(tmp_path, *KEY, compiler)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-3],
            "flipped": whole[:50] + bytes([whole[50] ^ 1]) + whole[51:],
            "empty": b"",
            "foreign": b"something else",
        }[damage]
    )
    assert cached_cubin(tmp_path, *KEY, compiler) == compiler.cubin
    assert compiler.runs == 2
    assert "damaged" in caplog.text
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert cached_cubin(tmp_path / "file" / "kernels", *KEY, Compiler(b"made")) == b"made"
    assert "cannot be kept" in caplog.text
    assert cached_cubin(None, *KEY, Compiler(b"made")) == b"made"


def test_kernels_lie_with_the_other_things_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))
    assert kernel_folder() == tmp_path / "kernels"
    monkeypatch.delenv("DEEPINFER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_folder() == tmp_path / "deepinfer" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_folder() == tmp_path / ".cache" / "deepinfer" / "kernels"
