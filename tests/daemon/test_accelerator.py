"""Finding the GPUs without torch."""

from __future__ import annotations

import pytest

from daemon.system.accelerator import nvidia_devices, usable_cores


@pytest.mark.parametrize(
    ("files", "visible", "found"),
    [
        ([], None, []),
        (["nvidiactl", "nvidia-uvm", "null"], None, []),
        (["nvidia0", "nvidia1", "nvidiactl"], None, ["0", "1"]),
        (["nvidia3"], None, ["0"]),
        (["nvidia0", "nvidia1"], "1", ["1"]),
        (["nvidia0"], "", []),
        (["nvidia0"], "GPU-abc, 1", ["GPU-abc", "1"]),
        ([], "0", []),
    ],
)
def test_devices(tmp_path, files, visible, found):
    for name in files:
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nvidia_devices(tmp_path, environment) == found


def test_there_is_a_core():
    assert usable_cores() >= 1
