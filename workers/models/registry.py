"""Which implementation serves which `model_type`. Each is imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

if TYPE_CHECKING:
    from workers.models.served_model import LoadModel

_LOADERS: Final = {
    "deepseek_v41": "workers.models.deepseek_v41.loading.loader",
    "deepseek_v41_text": "workers.models.deepseek_v41.loading.loader",
}
_TRANSFORMERS: Final = "workers.models.hf.model"
"""Serves every other model type."""


def model_loader(model_dir: Path) -> LoadModel:
    module = import_module(_LOADERS.get(_model_type(model_dir), _TRANSFORMERS))
    return cast("LoadModel", module.load)


def _model_type(model_dir: Path) -> str:
    try:
        config = msgspec.json.decode((model_dir / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return ""
    return str(config.get("model_type", "")) if isinstance(config, dict) else ""
