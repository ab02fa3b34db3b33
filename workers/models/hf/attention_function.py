"""Our attention as transformers models call it.

`register()` makes `paged_attention` known to transformers under `ATTENTION_NAME`. A model call then
carries a `LayerAttention` as the keyword `paged_step`; every attention layer hands it queries, keys and
values of the flattened batch, and it writes the pool, reads it and returns the output.

No mask function is registered on purpose: transformers then builds no mask at all, which saves work
and a host synchronisation. Models whose masks say more than "causal, with this window" are refused
when they are loaded (`workers/models/hf/probe.py`).
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn
from transformers import AttentionInterface

from workers.attention.backend import LayerAttention
from workers.attention.math import AttentionOptions
from workers.contract import ModelLoadError

ATTENTION_NAME: Final = "deepinfer_paged"

# Keywords that cannot change the result here: they ask for extra outputs, repeat what the step
# knows, or concern caches and training.
_HARMLESS_KEYWORDS: Final = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "past_key_values",
        "cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
        "position_embeddings",
        "tie_last_hidden_states",
        "deterministic",
    }
)


def register() -> None:
    """Make `paged_attention` available to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged_step: LayerAttention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface.

    Takes `query` [1,H,T,D], `key` and `value` [1,Hk,T,D]; returns ([1,T,H,Dv], None).

    Raises:
        ModelLoadError: the layer asks for something that would change the result and is not done
            here. The probe at load time finds this.
    """
    unknown = sorted(k for k, v in others.items() if v is not None and k not in _HARMLESS_KEYWORDS)
    if unknown:
        raise ModelLoadError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which this "
            "engine does not implement, so the model would give wrong text; it cannot be served."
        )
    if paged_step is None:
        raise ModelLoadError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention "
            "function, which this engine needs; it cannot be served."
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or not causal or dropout:
        raise ModelLoadError(
            f"{type(module).__name__} uses an attention mask of its own, bidirectional attention "
            "or dropout; only causal language models can be served."
        )
    options = AttentionOptions(
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or None,
        softcap=softcap,
        sinks=s_aux,
    )
    output = paged_step.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        options,
    )
    return output.unsqueeze(0), None
