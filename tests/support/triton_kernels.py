"""Triton kernels in tests: compiled on a GPU, elsewhere in Triton's interpreter, if Triton is installed
(`tests/conftest.py` asks for it).

Import this before any module with kernels.
"""

from __future__ import annotations

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MARKS = [pytest.mark.gpu] if ON_GPU else []

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime import interpreter  # noqa: E402

_patch = interpreter._patch_lang_tensor


def _patch_and_mend(tensor: type, scope: object) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())


# Triton 3.6's interpreter makes an index of an array of one element, which NumPy no longer does.
interpreter._patch_lang_tensor = _patch_and_mend
