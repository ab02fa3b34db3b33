"""What the attention kernels share: scores in base 2, and the end of an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scored(products, scaling, softcap):
    """Scores in units of `base_2_factor`, from products of queries and keys; `softcap` may be None.

    The factor is left to the subtraction in the exponent, which takes it for free.
    """
    if softcap is None:
        scores = products
    else:
        tanh = 1 - 2 / (tl.exp2(products * (2 * scaling / softcap * LOG2_E)) + 1)
        scores = tanh * softcap
    return scores


@triton.jit
def base_2_factor(scaling, softcap):
    if softcap is None:
        factor = scaling * LOG2_E
    else:
        factor = scaling * 0 + LOG2_E
    return factor


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
