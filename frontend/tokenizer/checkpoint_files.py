"""Reads the small text files of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from frontend.tokenizer.errors import TokenizerLoadError

JsonObject = dict[str, object]

TOKENIZER_CONFIG: Final = "tokenizer_config.json"


def read_text(path: Path) -> str | None:
    """The file's text, or None if there is no such file.

    Raises:
        TokenizerLoadError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerLoadError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise TokenizerLoadError(f"{path} is not UTF-8 text ({error.reason}).") from error


def read_object(path: Path) -> JsonObject:
    """The file's JSON object, or an empty one if there is no such file.

    Raises:
        TokenizerLoadError: it cannot be read, or holds something else.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerLoadError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise TokenizerLoadError(f"{path} holds no JSON object.")
    return value
