"""Puts the weights onto the device, or says in one sentence why they cannot be put there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from transport.wording import GIB
from workers.contract import ModelLoadError
from workers.hardware.device import free_memory
from workers.models.deepseek_v41.loading.load_progress import load_progress
from workers.models.deepseek_v41.loading.placing import WeightLoader, weight_bytes
from workers.models.deepseek_v41.model.model import DeepseekV41

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.weights.checkpoint import WeightSource
    from workers.settings import EngineSettings


def load_network(
    settings: EngineSettings,
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    report: Callable[[str], None],
) -> DeepseekV41:
    """Load the model with all its weights onto `device`. `report` hears of the progress.

    Raises:
        ModelLoadError: the weights do not fit, which is known before any is read, or loading failed.
    """
    try:
        model = DeepseekV41(config, dtype, device)
        needed, free = weight_bytes(model, source, dtype), free_memory(device)
        if needed > free:
            raise ModelLoadError(_too_big(settings, device, needed, free))
        with load_progress("loading weights", report) as progress:
            WeightLoader(model, source, dtype, device).load(progress)
    except ModelLoadError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(_too_big(settings, device, needed, free)) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelLoadError(
            f"The weights of {settings.model_dir} cannot be loaded to {device}: {reason}"
        ) from error
    return model


def _too_big(settings: EngineSettings, device: torch.device, needed: int, free: int) -> str:
    advice = "make room, or use a device with more memory or a smaller dtype"
    if settings.load_format == "dummy":
        advice += ", or cut the model with --hf-overrides '{\"num_hidden_layers\": N}'"
    return (
        f"The weights of {settings.model_dir} need {needed / GIB:.1f} GiB on {device}, and some more while "
        f"they are loaded, but {free / GIB:.1f} GiB are free there: {advice}."
    )
