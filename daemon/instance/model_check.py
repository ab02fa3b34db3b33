"""Whether a model's files are whole, before any process is started: each fault is one sentence.

What only a library can say of them, the worker and the tokenizer say when they load: with the same type of
error, which ends the start as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from daemon.configuration.config import InstanceConfig
from daemon.errors import ConfigurationError
from daemon.instance.memory_check import DTYPE_BYTES, check_memory, weight_bytes
from frontend.tokenizer.chat_template_files import read_chat_templates
from transport.model_files import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    ModelError,
    read_object,
    read_text,
)
from workers.models.config_sizes import read_model_config
from workers.models.safetensors_header import read_header
from workers.models.weight_files import weight_files

_OBJECTS: Final = (GENERATION_CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json")


def check_model(config: InstanceConfig, accelerator: str, model_dir: Path) -> None:
    """Read its small files and the headers of its weights, and see whether these fit into the memory.

    Raises:
        ConfigurationError: a file is missing, damaged or of something else, or there is too little memory.
    """
    try:
        read_model_config(model_dir)
        for name in _OBJECTS:
            read_object(model_dir / name)
        read_text(model_dir / TOKENIZER_FILE)
        read_chat_templates(model_dir)
        if config.engine == "fake" or config.load_format == "dummy":
            return
        float_bytes = DTYPE_BYTES[config.dtype]
        size = sum(weight_bytes(read_header(file), float_bytes) for file in weight_files(model_dir))
    except ModelError as error:
        raise ConfigurationError(str(error)) from error
    check_memory(config, accelerator, model_dir, size)
