"""Which class of work a kernel, or on a CPU an operation of PyTorch, belongs to, by its name."""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

KernelClass = Literal[
    "attention", "products", "norms, rotary, gates", "KV store", "sampling", "copies", "other"
]
_PATTERNS: Final[tuple[tuple[KernelClass, str], ...]] = (
    # The order counts: flash attention's names speak of CUTLASS, too. Steps are greedy: sampling is an
    # argmax, a softmax is attention's, and a top-k chooses experts or keys.
    (
        "attention",
        r"^_(prefill|decode|plan)_kernel|^_combine|flash|fmha|attention|attn|sdpa|softmax",
    ),
    ("sampling", r"argmax|^_draw_kernel"),
    (
        "products",
        r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|^dot_kernel|aten::(mm|addmm|bmm|baddbmm|mv|linear)$|mkl",
    ),
    ("KV store", r"^_store_kernel|index_?(put|copy)|scatter"),
    (
        "norms, rotary, gates",
        r"^_(norm|rotate|gate)_kernel|rms_?norm|layer_?norm|silu|gelu|rsqrt"
        r"|aten::(mul|add|pow|mean|neg|sin|cos|tanh)_?$",
    ),
    (
        "copies",
        r"memcpy|memset|copy|catarray|fillfunctor|index_?select|gather"
        r"|aten::(cat|clone|contiguous|index|fill_|zero_|embedding)$",
    ),
)
_COMPILED: Final = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS)

KERNEL_CLASSES: Final[tuple[KernelClass, ...]] = get_args(KernelClass)


def kernel_class(name: str) -> KernelClass:
    return next((found for found, pattern in _COMPILED if pattern.search(name)), "other")
