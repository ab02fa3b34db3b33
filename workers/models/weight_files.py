"""Which files of a model's directory its weights are read from; whatever else lies there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from transport.model_files import read_object
from workers.contract import ModelLoadError

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"

_SHARD: Final = re.compile(r"model-(\d{1,6})-of-(\d{1,6})\.safetensors")


def weight_files(model_dir: Path) -> list[Path]:
    """The one file; or those that the index names; or, without an index, the numbered shards.

    In this order, which is that of transformers.

    Raises:
        ModelLoadError: there are none, or not all of them; or the index is damaged.
    """
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    index = model_dir / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    return _numbered_files(model_dir)


def _indexed_files(index: Path) -> list[Path]:
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelLoadError(f"{index} is damaged: it has no weight_map; fetch it again.")
    names = set()
    for name in shards.values():
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise ModelLoadError(
                f"{index} names {name!r}, which is no *.safetensors file beside it; fetch it again."
            )
        names.add(name)
    files = [index.parent / name for name in sorted(names)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelLoadError(
            f"{index.parent} lacks {len(absent)} of {len(files)} shards, the first one is "
            f"{absent[0]}; fetch the rest of the checkpoint."
        )
    return files


def _numbered_files(model_dir: Path) -> list[Path]:
    numbered = {
        int(match[1]): (path, int(match[2]))
        for path in model_dir.glob("model-*.safetensors")
        if (match := _SHARD.fullmatch(path.name))
    }
    if not numbered:
        others = sorted(path.name for path in model_dir.glob("*.bin"))
        hint = f" ({others[0]} is of a format that is not read: convert it)" if others else ""
        raise ModelLoadError(
            f"{model_dir} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} nor "
            f"model-N-of-M.safetensors{hint}."
        )
    count = max(total for _, total in numbered.values())
    absent = sorted(set(range(1, count + 1)) - set(numbered))
    if absent:
        raise ModelLoadError(
            f"{model_dir} lacks {len(absent)} of {count} shards, the first one is number "
            f"{absent[0]}; fetch the rest of the checkpoint."
        )
    return [path for _, (path, _) in sorted(numbered.items())]
