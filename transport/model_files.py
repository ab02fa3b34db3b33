"""Reads the small files of a model's directory, which anybody may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

JsonObject = dict[str, object]

MODEL_CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENIZER_FILE: Final = "tokenizer.json"

MAX_TEXT_BYTES: Final = 256 << 20
"""No file is larger: a tokenizer of a million tokens has some 50 MB, an index of as many tensors 100."""
_LFS_POINTER: Final = "version https://git-lfs"


class ModelError(RuntimeError):
    """A model cannot be loaded or served here. One sentence that names the file and says what to do;
    a restart would not cure it."""


def read_text(path: Path) -> str | None:
    """The file's text, or None if there is no such file.

    Raises:
        ModelError: it cannot be read, or is no text that a model could have.
    """
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise ModelError(f"{path} is no regular file.")
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ModelError(
                f"{path} has {path.stat().st_size} bytes, more than such a file can have: fetch it again."
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text ({error.reason}).") from error
    if text.startswith(_LFS_POINTER):
        raise ModelError(
            f"{path} is only a Git LFS pointer: fetch the real file with 'git lfs pull'."
        )
    return text


def read_object(path: Path) -> JsonObject:
    """The file's JSON object; an empty one if there is no such file.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    text = read_text(path)
    if text is None:
        return {}
    value = parse_json(path, text)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object: fetch it again.")
    return value


def parse_json(path: Path, text: str) -> object:
    """The value of the text that was read from `path`.

    Raises:
        ModelError: it is no JSON.
    """
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ModelError(f"{path} is nested deeper than any such file: fetch it again.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): fetch it again.") from error
    return value
