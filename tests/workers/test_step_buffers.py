"""What a step is told arrives whole, at addresses that only its sizes decide."""

import numpy as np
import torch

from workers.engine.step_buffers import StepBuffers

CPU = torch.device("cpu")


def put_all(buffers: StepBuffers, arrays: list[np.ndarray]) -> list[torch.Tensor]:
    buffers.begin()
    views = [buffers.put(array) for array in arrays]
    buffers.send()
    return views


def arrays(start: int, *sizes: int) -> list[np.ndarray]:
    return [np.arange(start + i, start + i + size, dtype=np.int32) for i, size in enumerate(sizes)]


def test_equal_sizes_are_found_at_equal_addresses():
    buffers = StepBuffers(CPU, 0, 64, 4, 8)
    seen = []
    for start in (0, 1000):
        told = arrays(start, 5, 0, 1, 33)
        views = put_all(buffers, told)
        for view, array in zip(views, told, strict=True):
            assert view.dtype == torch.int32
            assert view.tolist() == array.tolist()
        seen.append([view.data_ptr() for view in views])
    assert seen[0] == seen[1]


def test_arrays_of_one_step_do_not_touch():
    buffers = StepBuffers(CPU, 0, 64, 4, 8)
    told = arrays(7, *range(1, 9))
    views = put_all(buffers, told)
    assert [view.tolist() for view in views] == [array.tolist() for array in told]
    assert all(view.data_ptr() % 128 == views[0].data_ptr() % 128 for view in views)


def test_what_does_not_fit_comes_all_the_same():
    buffers = StepBuffers(CPU, 0, 1, 1, 1)
    told = arrays(0, 10, 100_000, 10)
    assert [v.tolist() for v in put_all(buffers, told)] == [array.tolist() for array in told]


def test_the_words_of_an_array_may_lie_apart():
    buffers = StepBuffers(CPU, 0, 64, 4, 8)
    column = np.arange(6, dtype=np.int32).reshape(3, 2)[:, 1]
    (view,) = put_all(buffers, [column])
    assert view.tolist() == [1, 3, 5]
