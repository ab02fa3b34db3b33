"""Mistakes that are easy to make, made on purpose: each changes the logits by the amount that an
independent implementation measured for it. So the model makes none of them, and each would be noticed."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from workers.models.deepseek_v41.attention import attention, indexer
from workers.models.deepseek_v41.attention.compressor import Compressor
from workers.models.deepseek_v41.attention.indexer import Indexer, TopKSelector
from workers.models.deepseek_v41.attention.rope import Rotation, _frequencies, _yarn
from workers.models.deepseek_v41.engram.layer import Engram
from workers.models.deepseek_v41.linear import RMSNorm
from workers.models.deepseek_v41.model import hyper_connection, model
from workers.models.deepseek_v41.model.hyper_connection import HyperConnection, Mix
from workers.models.deepseek_v41.model.model import Layer
from workers.models.deepseek_v41.moe import moe
from workers.models.deepseek_v41.moe.moe import Gate


@pytest.fixture
def driver(new_driver):
    return new_driver()


def layers(driver):
    return driver.network.layers


def set_sink(driver, patch, value):
    for layer in layers(driver):
        layer.attn.attn_sink.fill_(value)


def keep_output_rotated(driver, patch):
    original = Rotation.apply_
    patch.setattr(
        Rotation, "apply_", lambda self, x, inverse=False: x if inverse else original(self, x)
    )


def rotate_halves(driver, patch):
    def apply(self, x, inverse=False):
        half = self.cos.shape[-1]
        shape = (len(self.cos), *(1 for _ in x.shape[1:-1]), half)
        cos, sin = self.cos.view(shape), self.sin.view(shape) * (-1 if inverse else 1)
        u, v = x[..., -2 * half : -half].clone(), x[..., -half:].clone()
        x[..., -2 * half : -half] = u * cos - v * sin
        x[..., -half:] = u * sin + v * cos
        return x

    patch.setattr(Rotation, "apply_", apply)


def no_yarn(driver, patch):
    network = driver.network
    network.compressed_rope.frequencies = _frequencies(16, 160000)


def wrong_theta(driver, patch):
    network = driver.network
    scaling = network.config.rope_scaling
    network.compressed_rope.frequencies = _yarn(_frequencies(16, 10000), 16, 10000, scaling)


def one_rope(driver, patch):
    network = driver.network
    network.window_rope = network.compressed_rope


def no_candidate_filter(driver, patch):
    original = TopKSelector.select
    patch.setattr(
        TopKSelector, "select", lambda self, role, query, blocks: original(self, role, query, None)
    )


def newest_block_not_kept(driver, patch):
    def best_blocks(self, scores, visible):
        size = self._config.candidate_block_size
        padded = functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = padded.view(len(scores), -1, size).amax(-1)
        return indexer.largest(best, self._config.candidate_topk_blocks)

    patch.setattr(TopKSelector, "_best_blocks", best_blocks)


def reuse_the_earlier_choice(driver, patch):
    original = Layer._select
    patch.setattr(
        Layer,
        "_select",
        lambda self, *args: None if self.role.filters_by_candidates else original(self, *args),
    )


def all_visible_entries(driver, patch):
    network = driver.network
    network.config = copy.copy(network.config)
    object.__setattr__(network.config, "index_topk", 4096)


def visible_entries_shifted(by):
    """As if rows were `by(ratio)` positions later; there are no entries after the last token's."""

    def mistake(driver, patch):
        original = TopKSelector.select

        def choose(self, role, *args):
            rows, last = self._rows, self._rows.spans[0].end - 1
            self._rows = replace(rows, positions=(rows.positions + by(role.ratio)).clamp(max=last))
            try:
                return original(self, role, *args)
            finally:
                self._rows = rows

        patch.setattr(TopKSelector, "select", choose)

    return mistake


def latent_rotated_at_the_last_token(driver, patch):
    original = Layer.write_entries

    def write_entries(self, x, rows, step, *args):
        moved = {r: replace(e, positions=e.positions + r - 1) for r, e in step.entries.items()}
        original(self, x, rows, replace(step, entries=moved), *args)

    patch.setattr(Layer, "write_entries", write_entries)


def second_kv_source_ignored(driver, patch):
    for layer in layers(driver)[4:6]:
        layer.role = replace(layer.role, kv_source=2, picks_topk=False)


def change_mix(change):
    def mistake(driver, patch):
        original = HyperConnection.forward
        patch.setattr(
            HyperConnection, "forward", lambda self, stream: change(original(self, stream))
        )

    return mistake


def sinkhorn_iterations(count):
    def mistake(driver, patch):
        for module in driver.network.modules():
            if isinstance(module, HyperConnection):
                module.iterations = count

    return mistake


def norm_per_stream(driver, patch):
    original = HyperConnection.forward

    def forward(self, stream):
        wide = stream.float()
        return original(self, wide * hyper_connection.inverse_rms(wide, self.norm_eps))

    patch.setattr(HyperConnection, "forward", forward)


def pre_used_by_its_own_sublayer(driver, patch):
    collapse, attention_input = model.collapse, Layer.attention_input
    waiting = []

    def enter(self, *args):
        waiting[:] = [self.hc_attn, self.hc_ffn]
        return attention_input(self, *args)

    def collapse_by_own_mix(stream, pre):
        return collapse(stream, waiting.pop(0)(stream).pre if waiting else pre)

    patch.setattr(Layer, "attention_input", enter)
    patch.setattr(model, "collapse", collapse_by_own_mix)


def large_eps(driver, patch):
    for module in driver.network.modules():
        for name in ("eps", "norm_eps"):
            if name == "eps" and isinstance(module, HyperConnection):
                continue
            if hasattr(module, name):
                setattr(module, name, 1e-6)


def router(change):
    def mistake(driver, patch):
        def forward(self, x):
            scores = functional.softplus(functional.linear(x, self.weight)).sqrt()
            return change(self, functional.linear(x, self.weight), scores)

        patch.setattr(Gate, "forward", forward)

    return mistake


def biased_weights(gate, logits, scores):
    biased = scores + gate.bias
    chosen = biased.topk(gate.top).indices
    weights = biased.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * gate.factor


def no_bias(gate, logits, scores):
    chosen = scores.topk(gate.top).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * gate.factor


def sigmoid_scores(gate, logits, scores):
    scores = logits.sigmoid()
    chosen = (scores + gate.bias).topk(gate.top).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * gate.factor


def not_normalised(gate, logits, scores):
    chosen = (scores + gate.bias).topk(gate.top).indices
    return chosen, scores.gather(1, chosen) * gate.factor


def no_factor(driver, patch):
    for layer in layers(driver):
        layer.ffn.gate.factor = 1.0


def no_clamp(driver, patch):
    for layer in layers(driver):
        layer.ffn.limit = layer.ffn.shared_experts.limit = math.inf


def clamp_gate_from_below(driver, patch):
    patch.setattr(
        moe,
        "swiglu",
        lambda gate, up, limit: (
            functional.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)
        ),
    )


def no_engram(driver, patch):
    patch.setattr(Engram, "forward", lambda self, stream, embeddings: stream)


def no_signed_root(driver, patch):
    original = torch.copysign
    patch.setattr(torch, "copysign", lambda root, match: original(match.abs(), match))


def unmapped_pad(driver, patch):
    driver.engram._hash._pad = 2


def short_window(driver, patch):
    original = model.attend

    def attend(queries, rows, *args):
        rows.window_valid[:, 0] = False
        return original(queries, rows, *args)

    patch.setattr(model, "attend", attend)


def scale_of_unrotated_channels(driver, patch):
    for layer in layers(driver):
        layer.attn.wq_b.weight.mul_((64 / 48) ** 0.5)


def swap_output_groups(driver, patch):
    for layer in layers(driver):
        weight = layer.attn.wo_a.weight
        weight.copy_(weight.view(2, 32, -1).flip(0).reshape(weight.shape))


def mean_pooling(driver, patch):
    for layer in layers(driver):
        if layer.role.writes_kv and layer.role.ratio == 2:
            layer.attn.compressor.wgate.weight.zero_()


def latent_not_normalised(driver, patch):
    original = Compressor.pool

    def pool(self, members):
        if not self.gated:
            return original(self, members)
        score, value = members.unbind(2)
        return (score.softmax(1) * value).sum(1)

    patch.setattr(Compressor, "pool", pool)


def no_relu(driver, patch):
    patch.setattr(torch.Tensor, "relu_", lambda self: self)


def no_head_weights(driver, patch):
    original = Indexer.queries

    def queries(self, *args):
        found, weights = original(self, *args)
        return found, torch.ones_like(weights)

    patch.setattr(Indexer, "queries", queries)


def index_query_not_rotated(driver, patch):
    def queries(self, x, qr, rotation):
        return self.wq_b(qr).view(len(x), self.heads, -1), self.weights_proj(x) * self.scale

    patch.setattr(Indexer, "queries", queries)


def index_key_from_the_rotated_latent(driver, patch):
    original = Indexer.keys
    patch.setattr(
        Indexer,
        "keys",
        lambda self, latent, rotation: original(self, rotation.apply_(latent.clone()), rotation),
    )


def shared_expert_scaled(driver, patch):
    for layer in layers(driver):
        layer.ffn.shared_experts.w2.weight.mul_(1.5)


def gate_and_up_swapped(driver, patch):
    patch.setattr(
        moe,
        "swiglu",
        lambda gate, up, limit: functional.silu(up.clamp(-limit, limit)) * gate.clamp(max=limit),
    )


def final_collapse_by_mean(driver, patch):
    original = model.DeepseekV41._logits
    patch.setattr(
        model.DeepseekV41,
        "_logits",
        lambda self, stream, pre, step: original(self, stream, torch.full_like(pre, 0.25), step),
    )


def query_norm_per_head(driver, patch):
    original = attention.Attention.queries

    def queries(self, x, rotation):
        found, low_rank = original(self, x, rotation)
        return found / found.square().mean(-1, keepdim=True).sqrt(), low_rank

    patch.setattr(attention.Attention, "queries", queries)


def engram_after_the_layer(driver, patch):
    attention_input, sublayers = Layer.attention_input, Layer.sublayers

    def enter(self, stream, pre, embeddings, rows):
        self.late = embeddings
        return attention_input(self, stream, pre, None, rows)

    def leave(self, *args):
        stream, pre = sublayers(self, *args)
        return (stream if self.late is None else self.engram(stream, self.late)), pre

    patch.setattr(Layer, "attention_input", enter)
    patch.setattr(Layer, "sublayers", leave)


def primes_start_again(driver, patch):
    hashing = driver.engram._hash
    hashing._primes[1] = hashing._primes[0]


def engram_norm_over_all_streams(driver, patch):
    from workers.models.deepseek_v41.engram import layer as engram

    original = engram.inverse_rms

    def inverse_rms(x, eps):
        return torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + eps)

    assert original is RMSNorm.forward.__globals__["inverse_rms"]
    patch.setattr(engram, "inverse_rms", inverse_rms)


MISTAKES = {
    "no attention sink": (lambda d, p: set_sink(d, p, -1e30), 3.65),
    "sink logit 0": (lambda d, p: set_sink(d, p, 0), 4.21),
    "output not rotated back": (keep_output_rotated, 6.09),
    "half-split rope": (rotate_halves, 9.09),
    "no YaRN": (no_yarn, 5.36),
    "rope_theta everywhere": (wrong_theta, 5.23),
    "compress_rope_theta everywhere": (one_rope, 6.71),
    "candidate filter left out": (no_candidate_filter, 0.36),
    "newest block not kept": (newest_block_not_kept, 0.18),
    "reindex layer reuses the choice": (reuse_the_earlier_choice, 1.03),
    "latent rotated at the last token": (latent_rotated_at_the_last_token, 5.24),
    "all visible entries": (all_visible_entries, 1.89),
    "entry visible early": (visible_entries_shifted(lambda ratio: ratio - 1), 2.82),
    "entry visible late": (visible_entries_shifted(lambda ratio: -1), 2.87),
    "second kv source ignored": (second_kv_source_ignored, 3.66),
    "pre used by its own sublayer": (pre_used_by_its_own_sublayer, 5.01),
    "mHC norm per stream": (norm_per_stream, 5.56),
    "comb transposed": (
        change_mix(lambda mix: Mix(mix.pre, mix.post, mix.comb.transpose(1, 2))),
        4.64,
    ),
    "1 Sinkhorn iteration": (sinkhorn_iterations(1), 5.94),
    "3 Sinkhorn iterations": (sinkhorn_iterations(3), 3.61),
    "post without the factor 2": (
        change_mix(lambda mix: Mix(mix.pre, mix.post / 2, mix.comb)),
        6.77,
    ),
    "norm eps 1e-6": (large_eps, 3.61),
    "weights from biased scores": (router(biased_weights), 6.35),
    "router bias ignored": (router(no_bias), 6.49),
    "sigmoid scores": (router(sigmoid_scores), 5.55),
    "weights not normalised": (router(not_normalised), 6.78),
    "factor 1.5 missing": (no_factor, 5.31),
    "no SwiGLU clamp": (no_clamp, 7.23),
    "gate clamped from below": (clamp_gate_from_below, 4.56),
    "no Engram": (no_engram, 6.73),
    "no signed square root": (no_signed_root, 4.80),
    "pad id not mapped": (unmapped_pad, 3.66),
    "window one token short": (short_window, 6.68),
    "scale of the unrotated channels": (scale_of_unrotated_channels, 5.62),
    "output groups in the wrong order": (swap_output_groups, 9.13),
    "mean instead of gated pooling": (mean_pooling, 5.78),
    "latent not normalised": (latent_not_normalised, 5.26),
    "no relu in the indexer": (no_relu, 2.32),
    "no head weights in the indexer": (no_head_weights, 2.01),
    "index query not rotated": (index_query_not_rotated, 2.80),
    "index key from the rotated latent": (index_key_from_the_rotated_latent, 2.13),
    "shared expert times 1.5": (shared_expert_scaled, 5.69),
    "w1 and w3 swapped": (gate_and_up_swapped, 8.75),
    "final collapse by mean": (final_collapse_by_mean, 0.18),
    "per-head query norm": (query_norm_per_head, 6.97),
    "primes start again per layer": (primes_start_again, 4.82),
    "Engram after the layer": (engram_after_the_layer, 5.86),
    "Engram norm over all streams": (engram_norm_over_all_streams, 3.04),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows_as_it_was_measured(driver, golden, monkeypatch, name):
    make_mistake, effect = MISTAKES[name]
    expected = golden("v41_tiny", "golden")
    with torch.inference_mode():
        make_mistake(driver, monkeypatch)
    logits = driver.prefill(driver.prompt(expected["p37.input_ids"]))[-16:]
    difference = (logits - expected["p37.logits_last16"]).abs().max()
    assert float(difference) == pytest.approx(effect, abs=0.02)
