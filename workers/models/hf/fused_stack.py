"""The decoder layers of Llama-shaped models as one module.

A residual stream joins neighbouring layers, so adding to it and the next norm are one kernel only if one
module runs all layers. The model around it keeps its embeddings, its rotary module and its head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
from torch import Tensor, nn

from workers.kernels.layer_ops import Activation, HeadShape, LayerOps, Norm
from workers.models.hf.fused_modules import FusedLinear, agree, find_activation, find_norm
from workers.models.hf.network import network_logits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.attention.backend import LayerAttention
    from workers.attention.math import AttentionOptions

_LAYER_PARTS: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS: Final = {"q_norm", "k_norm"}
_CHECK_TOKENS: Final = 5


class _Attention(Protocol):
    layer_idx: int
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class _Mlp(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class _Decoder(Protocol):
    """What is swapped: the layers, and the norm behind them."""

    layers: nn.ModuleList
    norm: nn.Module


@dataclass(frozen=True)
class _Layer:
    index: int
    options: AttentionOptions
    shape: HeadShape
    norms: tuple[Norm, Norm]
    """Before attention, and before the feed-forward layer."""
    head_norms: tuple[Norm, Norm] | None
    activation: Activation
    qkv: FusedLinear
    output: nn.Linear
    gate_up: FusedLinear
    down: nn.Linear


class FusedStack(nn.Module):
    """All decoder layers and the norm behind them, called like one layer."""

    def __init__(self, ops: LayerOps, layers: list[_Layer], last_norm: Norm) -> None:
        super().__init__()
        self._ops = ops
        self._layers = layers
        self._norms = [*(norm for layer in layers for norm in layer.norms), last_norm]

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged_step: LayerAttention,
        **_unused: object,
    ) -> Tensor:
        """Take and return [1,T,width]. The result is normalised."""
        ops, residual = self._ops, hidden_states[0]
        cos, sin = position_embeddings
        rotary = cos[0], sin[0]
        x = ops.norm(residual, self._norms[0])
        for layer, (mlp_norm, next_norm) in zip(
            self._layers, zip(self._norms[1::2], self._norms[2::2], strict=True), strict=True
        ):
            qkv = ops.rotate(layer.qkv(x), layer.shape, rotary, layer.head_norms)
            out = paged_step.attend(layer.index, *layer.shape.split(qkv), layer.options)
            x, residual = ops.add_norm(layer.output(out.flatten(1)), residual, mlp_norm)
            x = layer.down(ops.gate(layer.gate_up(x), layer.activation))
            x, residual = ops.add_norm(x, residual, next_norm)
        return x[None]


def fuse_stack(network: nn.Module, ops: LayerOps, device: torch.device) -> bool:
    """Swap the decoder layers of `network` for a `FusedStack`.

    Returns False, and leaves the network as it is, if its layers have another shape or the swapped network
    gives other results on a few tokens.
    """
    decoder = cast("_Decoder", getattr(network, "model", None))
    parts = set(dict(cast("nn.Module", decoder).named_children())) if decoder is not None else set()
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    attention = _MixingAttention()
    expected = _check_logits(network, attention, device)
    original = decoder.layers, decoder.norm
    last_norm = find_norm(decoder.norm, ops)
    layers = [_describe(layer, ops, attention.options) for layer in decoder.layers]
    known = [layer for layer in layers if layer is not None]
    if last_norm is None or len(known) != len(layers):
        return False
    decoder.layers = nn.ModuleList([FusedStack(ops, known, last_norm)])
    decoder.norm = nn.Identity()
    if agree(_check_logits(network, _MixingAttention(), device), expected):
        return True
    decoder.layers, decoder.norm = original
    return False


def _describe(
    layer: nn.Module, ops: LayerOps, options: Mapping[int, AttentionOptions]
) -> _Layer | None:
    parts = dict(layer.named_children())
    if set(parts) != _LAYER_PARTS:
        return None
    names = set(dict(parts["self_attn"].named_children()))
    if names not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
        return None
    attention = cast("_Attention", parts["self_attn"])
    mlp = cast("_Mlp", parts["mlp"])
    activation = find_activation(parts["mlp"])
    norms = [
        find_norm(parts[name], ops) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    head_norms = [find_norm(getattr(attention, n), ops) for n in sorted(names & _HEAD_NORMS)[::-1]]
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    if activation is None or None in norms or None in head_norms:
        return None
    if not FusedLinear.fits(list(projections)) or type(attention.o_proj) is not nn.Linear:
        return None
    dim = attention.head_dim
    return _Layer(
        index=attention.layer_idx,
        options=options[attention.layer_idx],
        shape=HeadShape(
            attention.q_proj.out_features // dim, attention.k_proj.out_features // dim, dim
        ),
        norms=cast("tuple[Norm, Norm]", tuple(norms)),
        head_norms=cast("tuple[Norm, Norm]", tuple(head_norms)) if head_norms else None,
        activation=activation,
        qkv=FusedLinear(projections),
        output=attention.o_proj,
        gate_up=FusedLinear([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
    )


@dataclass
class _MixingAttention:
    """A `LayerAttention` whose output depends on everything that it gets, without a pool.

    It notes each layer's options.
    """

    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.options[layer] = options
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (key, value))
        scores = torch.einsum("thd,lhd->htl", query.float(), keys.float()) * options.scaling
        return torch.einsum("htl,lhd->thd", scores.softmax(-1), values.float()).to(query.dtype)


def _check_logits(network: nn.Module, attention: _MixingAttention, device: torch.device) -> Tensor:
    """Return the logits [T,vocab_size] of a few tokens far apart."""
    vocabulary = cast("nn.Embedding", network.get_input_embeddings()).num_embeddings  # type: ignore[operator]
    rows = torch.arange(_CHECK_TOKENS, device=device)
    ids = (rows * 97 + 3) % vocabulary
    return network_logits(network, ids[None], 41 * rows[None], attention, rows)
