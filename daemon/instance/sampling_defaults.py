"""What the model's `generation_config.json` says of sampling, for requests that do not say."""

from __future__ import annotations

from pathlib import Path

import msgspec

from daemon.configuration.config import SamplingSource
from daemon.errors import ConfigurationError
from frontend.settings import (
    MinP,
    RepetitionPenalty,
    SamplingDefaults,
    Temperature,
    TopK,
    TopP,
)
from transport.model_files import GENERATION_CONFIG, read_object


class _GenerationConfig(msgspec.Struct, omit_defaults=True):
    """None: absent from the file. What transformers itself would take then (top_k 50, no sampling) is
    not the wish of the model's authors, and is not applied."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    do_sample: bool | None = None


def read_sampling_defaults(model_dir: Path, source: SamplingSource) -> SamplingDefaults:
    """The model's, or OpenAI's where it names none.

    Raises:
        ModelError: the file cannot be read.
        ConfigurationError: a value is out of the API's range.
    """
    if source == "openai":
        return SamplingDefaults()
    path = model_dir / GENERATION_CONFIG
    try:
        named = msgspec.convert(read_object(path), _GenerationConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"{path} gives no usable sampling defaults ({error}): "
            "correct it, or ignore it with --sampling-defaults openai."
        ) from error
    if named.do_sample is False:
        # transformers then takes the most likely token; the filters have no effect.
        named = _GenerationConfig(temperature=0.0, repetition_penalty=named.repetition_penalty)
    return msgspec.convert(msgspec.to_builtins(named), SamplingDefaults)
