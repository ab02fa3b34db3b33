"""From settings to an engine: the device, the model, the sizes of its pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from workers.contract import EngineInfo
from workers.engine.engine import ModelEngine
from workers.engine.pool_sizing import allocating_pools, size_pools
from workers.hardware.device import open_device
from workers.models.registry import model_loader
from workers.models.served_model import LoadObserver
from workers.settings import EngineSettings


def create_engine(settings: EngineSettings, observer: LoadObserver) -> ModelEngine:
    """Load a model and plan its memory.

    Raises:
        ModelLoadError: the model cannot be loaded or served here. The message is one sentence.
    """
    device = open_device(settings.accelerator, settings.device_index, settings.num_threads)
    loaded = model_loader(Path(settings.model_dir))(settings, device, observer)
    on_cpu = device.type == "cpu"
    info = EngineInfo(
        layout=loaded.layout,
        num_pages=0,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        pipeline_depth=0 if on_cpu or loaded.needs_tokens_on_host else 1,
        device=str(device) if on_cpu else torch.cuda.get_device_name(device),
    )

    def open_engine(sized: EngineInfo, on_close: Callable[[], None]) -> ModelEngine:
        model = loaded.serve(sized.num_pages, sized.max_num_seqs)
        return ModelEngine(model, sized, device, settings.max_batched_tokens, on_close)

    def open_trial(sized: EngineInfo) -> ModelEngine:
        return open_engine(sized, on_close=lambda: None)

    info = size_pools(settings, info, device, open_trial, observer.report)
    with allocating_pools(info, device):
        engine = open_engine(info, loaded.close)
        engine.capture_decodes(observer.report)
        return engine
