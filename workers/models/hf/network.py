"""The call of a transformers model over a flattened batch."""

from __future__ import annotations

from torch import Tensor, nn

from workers.attention.backend import LayerAttention


def network_logits(
    network: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    attention: LayerAttention,
    rows: Tensor,
) -> Tensor:
    """Return the logits [R,vocab_size] of `rows`.

    Args:
        network: a causal language model with our attention function.
        input_ids: [1,T].
        position_ids: int64 [1,T].
        attention: what its attention layers call.
        rows: int64 [R].
    """
    output = network(
        input_ids=input_ids,
        position_ids=position_ids,
        use_cache=False,
        logits_to_keep=rows,
        paged_step=attention,
    )
    logits: Tensor = output.logits[0]
    # A few models take `logits_to_keep` without honouring it.
    return logits if logits.shape[0] == rows.shape[0] else logits[rows]
