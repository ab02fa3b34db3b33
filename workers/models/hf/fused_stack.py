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

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.attention.backend import LayerAttention
    from workers.attention.math import AttentionOptions

_LAYER_PARTS: Final = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS: Final = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS: Final = {"q_norm", "k_norm"}
_TRIAL_TOKENS: Final = 5


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
    embed_tokens: nn.Embedding
    rotary_emb: nn.Module
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

    def run(
        self,
        ops: LayerOps,
        x: Tensor,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention: LayerAttention,
    ) -> tuple[Tensor, Tensor]:
        """Take the normalised residual stream and itself, [T,width] each.

        Returns what is to be added to the stream, and the stream.
        """
        qkv = ops.linear(x, self.qkv.weight, self.qkv.bias)
        qkv = ops.rotate(qkv, self.shape, rotary, self.head_norms)
        out = attention.attend(self.index, *self.shape.split(qkv), self.options)
        x, residual = ops.add_norm(
            _apply(ops, self.output, out.flatten(1)), residual, self.norms[1]
        )
        gated = ops.gated_linear(x, self.gate_up.weight, self.gate_up.bias, self.activation)
        return _apply(ops, self.down, gated), residual


def _apply(ops: LayerOps, layer: nn.Linear, x: Tensor) -> Tensor:
    return ops.linear(x, layer.weight, layer.bias)


class FusedStack(nn.Module):
    """All decoder layers and the norm behind them, called like one layer."""

    def __init__(self, ops: LayerOps, layers: list[_Layer], last_norm: Norm) -> None:
        super().__init__()
        self._ops = ops
        self._layers = layers
        self._next_norms = [*(layer.norms[0] for layer in layers[1:]), last_norm]

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        paged_step: LayerAttention,
        **_unused: object,
    ) -> Tensor:
        """Take and return [1,T,width]. The result is normalised."""
        residual = hidden_states[0]
        cos, sin = position_embeddings
        x = self._ops.norm(residual, self._layers[0].norms[0])
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            x, residual = layer.run(self._ops, x, residual, (cos[0], sin[0]), paged_step)
            x, residual = self._ops.add_norm(x, residual, next_norm)
        return x[None]


def fuse_stack(network: nn.Module, ops: LayerOps, device: torch.device) -> bool:
    """Swap the decoder layers of `network` for a `FusedStack`.

    Returns False, and leaves the network as it is, if its layers have another shape or some layer gives other
    results than before on a few tokens.
    """
    decoder = cast("_Decoder", getattr(network, "model", None))
    parts = set(dict(cast("nn.Module", decoder).named_children())) if decoder is not None else set()
    if parts != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if not all(_has_shape(layer) for layer in decoder.layers):
        return False
    trial = _Trial(decoder, device)
    last_norm = find_norm(decoder.norm, ops)
    layers: list[_Layer] = []
    for module in decoder.layers:
        before = trial.run(module)
        layer = _describe(module, ops, trial.options)
        if layer is None or not agree(trial.run_fused(layer, ops), before):
            return False
        layers.append(layer)
    if last_norm is None:
        return False
    decoder.layers = nn.ModuleList([FusedStack(ops, layers, last_norm)])
    decoder.norm = nn.Identity()
    return True


def _has_shape(layer: nn.Module) -> bool:
    parts = dict(layer.named_children())
    if set(parts) != _LAYER_PARTS:
        return False
    names = set(dict(parts["self_attn"].named_children()))
    return names in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS)


def _describe(
    layer: nn.Module, ops: LayerOps, options: Mapping[int, AttentionOptions]
) -> _Layer | None:
    parts = dict(layer.named_children())
    names = set(dict(parts["self_attn"].named_children()))
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


class _Trial:
    """Runs layers one after the other on a few tokens far apart."""

    def __init__(self, decoder: _Decoder, device: torch.device) -> None:
        vocabulary = decoder.embed_tokens.num_embeddings
        rows = torch.arange(_TRIAL_TOKENS, device=device)
        self._positions = 41 * rows[None]
        self._hidden: Tensor = decoder.embed_tokens((rows * 97 + 3) % vocabulary)[None]
        self._rotary = decoder.rotary_emb(self._hidden, self._positions)
        self._input = self._hidden
        self.options: dict[int, AttentionOptions] = {}

    def run(self, module: nn.Module) -> Tensor:
        """Run the next layer as transformers wrote it, and note its options."""
        attention = _MixingAttention()
        self._input = self._hidden
        self._hidden = module(
            self._input,
            attention_mask=None,
            position_ids=self._positions,
            position_embeddings=self._rotary,
            use_cache=False,
            paged_step=attention,
        )
        self.options.update(attention.options)
        return self._hidden

    def run_fused(self, layer: _Layer, ops: LayerOps) -> Tensor:
        """Run the same layer on the same input."""
        stream = self._input[0]
        rotary = self._rotary[0][0], self._rotary[1][0]
        x = ops.norm(stream, layer.norms[0])
        added, stream = layer.run(ops, x, stream, rotary, _MixingAttention())
        return (stream + added)[None]
