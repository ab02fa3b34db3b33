"""Which implementation serves which `model_type`. Each is imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from workers.models.config_sizes import read_model_config

if TYPE_CHECKING:
    from workers.models.served_model import LoadModel

_LOADERS: Final = {
    "deepseek_v41": "workers.models.deepseek_v41.loading.loader",
    "deepseek_v41_text": "workers.models.deepseek_v41.loading.loader",
}
_TRANSFORMERS: Final = "workers.models.hf.model"
"""Serves every other model type."""


def model_loader(model_dir: Path) -> LoadModel:
    """
    Raises:
        ModelError: `config.json` cannot be used by any implementation.
    """
    model_type = str(read_model_config(model_dir).get("model_type", ""))
    module = import_module(_LOADERS.get(model_type, _TRANSFORMERS))
    return cast("LoadModel", module.load)
