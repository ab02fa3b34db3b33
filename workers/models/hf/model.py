"""Models of transformers, as they are, with our attention in place of theirs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workers.attention.batch import Batch, BatchTensors, StepUpload
from workers.attention.batch_invariant_attention import BatchInvariantAttention
from workers.attention.page_pool import PagePool
from workers.attention.torch_attention import TorchAttention
from workers.contract import ModelLoadError
from workers.hardware.device import DTypeName, default_dtype, offline_environment
from workers.models.hf.fused_modules import fuse_modules
from workers.models.hf.fused_stack import fuse_stack
from workers.models.hf.loader import load_config, load_weights
from workers.models.hf.network import network_logits
from workers.models.hf.page_layout import build_cache_layout, layer_shapes
from workers.models.hf.probe import pin_rope, probe_model
from workers.models.hf.tiled_linears import TiledLinears
from workers.models.served_model import LoadedModel, LoadObserver, choose_context_length
from workers.models.weights_identity import weights_identity

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from workers.attention.backend import AttentionBackend
    from workers.settings import EngineSettings


class HfModel:
    """Implements `ServedModel`."""

    states = None

    def __init__(self, network: nn.Module, pool: PagePool, tiled: TiledLinears | None) -> None:
        """`tiled`: the network's linear layers, for batch-invariant results. None: as fast as possible."""
        self._network = network
        self._pool = pool
        self._tiled = tiled
        self._attention = _attention(pool, tiled is not None)

    @property
    def pages(self) -> Tensor:
        return self._pool.rows

    @property
    def captures_decodes(self) -> bool:
        return self._attention.captures_decodes

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        self._attention.prepare(batch, upload)
        if self._tiled is not None:
            self._tiled.begin(batch)

    def forward(self, tensors: BatchTensors) -> Tensor:
        self._attention.begin(tensors)
        return network_logits(
            self._network,
            tensors.token_ids[None],
            tensors.positions[None],
            self._attention,
            tensors.logit_rows,
        )

    def collected(self, slots: list[int], tokens: Tensor) -> None:
        """Nothing here looks at tokens on the host."""


def load(settings: EngineSettings, device: torch.device, observer: LoadObserver) -> LoadedModel:
    offline_environment()
    leave_out_cudnn_attention()
    model_dir = Path(settings.model_dir)
    loaded = load_config(model_dir, settings.hf_overrides)
    dtype = settings.dtype
    if dtype == "auto":
        dtype = default_dtype(device, loaded.checkpoint_dtype)
    shapes = layer_shapes(loaded.config)
    kv_dtype = _kv_dtype(settings, dtype)
    observer.check_layout(build_cache_layout(shapes, kv_dtype, loaded.config, ""))
    observer.report(f"loading {loaded.config.model_type} weights as {dtype} to {device}")
    with torch.inference_mode():
        network = load_weights(loaded, model_dir, device, dtype, settings.load_format)
        vocab_size = probe_model(network, loaded, shapes, device)
        max_model_len = choose_context_length(settings.max_model_len, loaded.max_position)
        rope = f":{max_model_len}" if pin_rope(network, max_model_len, device) else ""
        tiled = _tile_linears(network, device) if settings.deterministic else None
        if device.type == "cuda":
            _fuse(network, device)
    identity = "dummy" if settings.load_format == "dummy" else weights_identity(model_dir)
    layout = build_cache_layout(shapes, kv_dtype, loaded.config, identity + rope)
    return LoadedModel(
        layout=layout,
        vocab_size=vocab_size,
        eos_token_ids=tuple(t for t in loaded.eos_token_ids if t < vocab_size),
        max_model_len=max_model_len,
        needs_tokens_on_host=False,
        serve=lambda pages, _slots: HfModel(network, PagePool(layout, pages, device), tiled),
    )


def _attention(pool: PagePool, batch_invariant: bool) -> AttentionBackend:
    if batch_invariant:
        return BatchInvariantAttention(pool)
    if pool.rows.is_cuda:
        # Imported here: a CPU worker may have no Triton.
        from workers.attention.triton.backend import create_attention  # noqa: PLC0415

        return create_attention(pool)
    return TorchAttention(pool)


def _fuse(network: nn.Module, device: torch.device) -> None:
    """Swap modules for such as launch fewer kernels, on a GPU."""
    from workers.kernels.triton.layer_ops import TritonLayerOps  # noqa: PLC0415  as above

    ops = TritonLayerOps()
    if fuse_stack(network, ops, device):
        _log.info("The decoder layers run as one fused module.")
    else:
        _log.info("%d modules run as fused kernels.", fuse_modules(network, ops))


def leave_out_cudnn_attention() -> None:
    """Remove cuDNN from PyTorch's choice of attention kernels, for the whole process.

    On a Hopper GPU PyTorch tries cuDNN first, and cuDNN builds a plan for every new shape of queries and
    keys. Here nearly every step has a new shape. The other kernels take any shape as it is.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _tile_linears(network: nn.Module, device: torch.device) -> TiledLinears:
    if device.type != "cpu":
        raise ModelLoadError(
            "--deterministic covers models other than DeepSeek-V4.1 on a CPU only: run it without, "
            "or with DEEPINFER_ACCELERATOR=cpu."
        )
    torch.set_num_threads(1)  # with more, the last bits depend on how a tensor is divided
    head = network.get_output_embeddings()  # type: ignore[operator]
    return TiledLinears(network, head)


def _kv_dtype(settings: EngineSettings, dtype: DTypeName) -> DTypeName:
    match settings.kv_dtype:
        case "compact":
            raise ModelLoadError(
                "--kv-dtype compact exists for DeepSeek-V4.1 only; use auto, float32 or bf16."
            )
        case "bf16":
            return "bfloat16"
        case "float32":
            return "float32"
        case "auto":
            return dtype
