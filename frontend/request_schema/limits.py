"""What requests are checked against, beyond their own shape."""

from __future__ import annotations

import msgspec

from frontend.settings import SamplingDefaults

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 16_384
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_SALT_CHARACTERS = 512
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 256
MAX_TOOLS = 1024
COMPLETIONS_DEFAULT_TOKENS = 16
"""`max_tokens` of a completion that gives none, as the API has it."""


class ModelLimits(msgspec.Struct, frozen=True):
    """What the served model and the instance's settings allow."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_choices: int
    sampling: SamplingDefaults = SamplingDefaults()
