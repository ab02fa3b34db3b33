"""What the attention kernels share: scores in base 2, and the end of an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(products, scaling, softcap):
    """Scores times log2(e) from products of queries and keys; `softcap` may be None."""
    if softcap is None:
        scores = products * (scaling * LOG2_E)
    else:
        tanh = 1 - 2 / (tl.exp2(products * (2 * scaling / softcap * LOG2_E)) + 1)
        scores = tanh * (softcap * LOG2_E)
    return scores


@triton.jit
def finish(acc, m, total, sinks, heads, head_exists):
    """Divide `acc` [X,Dv] by the softmax's sum, sinks of `heads` [X] included; `sinks` may be None.

    Rows without keys give zeros.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=head_exists, other=0.0).to(tl.float32) * LOG2_E
        m_all = tl.maximum(m, sink)
        shrink = tl.exp2(m - m_all)
        total = total * shrink + tl.exp2(sink - m_all)
        acc = acc * shrink[:, None]
    return acc / tl.where(total == 0, 1.0, total)[:, None]
