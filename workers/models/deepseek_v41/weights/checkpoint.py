"""Opens a DeepSeek-V4.1 checkpoint: checks all of it from the headers, then reads it shard by shard."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from workers.contract import ModelLoadError
from workers.models.deepseek_v41.weights.tensor_table import (
    BYTE_DTYPES,
    EXPERT_NAME,
    FLOAT_DTYPES,
    FP8_DTYPE,
    SCALE_DTYPES,
    expected_tensors,
    scale_name,
    stored_shape,
)
from workers.models.safetensors_header import StoredTensor, read_header
from workers.models.weight_files import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from workers.models.deepseek_v41.config.model_config import ModelConfig

    Progress = Callable[[int, int], None]
    """Called with the bytes done and the bytes in all."""
    NamedTensors = Iterable[tuple[str, torch.Tensor]]

# Draft model and vision tower: parts of the release that text generation does not use.
_OTHER_PARTS: Final = ("mtp.", "vision.", "aligner.", "image_")
_OPEN_FILES: Final = 2
_KNOWN_DTYPES: Final = FLOAT_DTYPES | BYTE_DTYPES | SCALE_DTYPES | {FP8_DTYPE}


class WeightSource(Protocol):
    """Supplies weights, from a checkpoint or made up with the same shapes."""

    def shards(
        self, wanted: Callable[[str], bool] | None = None, progress: Progress | None = None
    ) -> Iterator[NamedTensors]:
        """Yield the `wanted` tensors (default: all) in groups, as stored: weights and their scales.

        A scale is named like its weight, with `scale` for `weight`. Packed FP4 is uint8. A tensor may be a
        view of a mapped file, which stays mapped while the tensor lives: copy it to keep it.
        """
        ...

    def scale_of(self, name: str) -> torch.Tensor | None: ...

    def is_packed(self, name: str) -> bool: ...


@dataclass
class Checkpoint:
    """A complete checkpoint on disk. Not thread-safe."""

    tensors: Mapping[str, StoredTensor]
    """The text model's tensors by released name, scales included."""
    _open: OrderedDict[Path, safe_open] = field(default_factory=OrderedDict)

    def shards(
        self, wanted: Callable[[str], bool] | None = None, progress: Progress | None = None
    ) -> Iterator[NamedTensors]:
        by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
        for name, stored in self.tensors.items():
            if wanted is None or wanted(name):
                by_file.setdefault(stored.file, []).append((name, stored))
        meter = _Meter(sum(t.size for group in by_file.values() for _, t in group), progress)
        for _, group in sorted(by_file.items()):
            yield self._read_all(sorted(group, key=lambda item: item[1].offset), meter)

    def scale_of(self, name: str) -> torch.Tensor | None:
        scale = scale_name(name)
        return self.read(scale) if scale in self.tensors else None

    def is_packed(self, name: str) -> bool:
        return self.tensors[name].dtype in BYTE_DTYPES

    def read(self, name: str) -> torch.Tensor:
        stored = self.tensors[name]
        try:
            handle = self._handle(stored.file)
            tensor: torch.Tensor = handle.get_tensor(stored.key)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"{stored.key} cannot be read from {stored.file}: {error}."
            ) from error
        return tensor.view(torch.uint8) if stored.dtype in BYTE_DTYPES else tensor

    def close(self) -> None:
        self._open.clear()

    def _read_all(self, group: list[tuple[str, StoredTensor]], meter: _Meter) -> NamedTensors:
        for name, stored in group:
            yield name, self.read(name)
            meter.add(stored.size)

    def _handle(self, file: Path) -> safe_open:
        # The shard being read, and one more for a scale that lies elsewhere.
        handle = self._open.pop(file, None) or safe_open(file, framework="pt")
        self._open[file] = handle
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return handle


@dataclass
class _Meter:
    total: int
    progress: Progress | None
    done: int = 0

    def add(self, size: int) -> None:
        self.done += size
        if self.progress is not None:
            self.progress(self.done, self.total)


def open_checkpoint(model_dir: Path, config: ModelConfig) -> Checkpoint:
    """Check the checkpoint in `model_dir` against `config`. Reads only the files' headers.

    Raises:
        ModelError: a file is missing, truncated, damaged or a Git LFS pointer; a tensor is
            missing, unknown, of a wrong shape or of a dtype that is not implemented; or only some
            of a layer's experts are packed.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(model_dir):
        for stored in read_header(file):
            name = stored.key.removeprefix("model.")
            if name in found:
                raise ModelLoadError(
                    f"{name} is stored twice, in {found[name].file} and in {file}; remove the "
                    "files that do not belong to the checkpoint."
                )
            found[name] = stored
    ours = {name: t for name, t in found.items() if not name.startswith(_OTHER_PARTS)}
    _check(model_dir, ours, config)
    return Checkpoint(ours)


def _check(model_dir: Path, found: Mapping[str, StoredTensor], config: ModelConfig) -> None:
    block = config.quantization.weight_block_size if config.quantization else None
    known: set[str] = set()
    missing: list[str] = []
    for name, tensor in expected_tensors(config).items():
        stored = found.get(name)
        if stored is None:
            if tensor.required:
                missing.append(name)
            continue
        known.add(name)
        shapes = stored_shape(tensor, stored.dtype, block)
        if shapes is None:
            raise ModelLoadError(_unknown_storage(stored, quantized=block is not None))
        _check_shape(stored, shapes.data)
        if shapes.scale is None:
            continue
        scale = found.get(scale_name(name))
        if scale is None:
            missing.append(scale_name(name))
            continue
        known.add(scale_name(name))
        if scale.dtype not in SCALE_DTYPES:
            raise ModelLoadError(_unknown_storage(scale, quantized=True))
        _check_shape(scale, shapes.scale)
    if missing:
        raise ModelLoadError(
            f"{model_dir} lacks {len(missing)} tensors that its configuration calls for, the first "
            f"one is {missing[0]}; the checkpoint is incomplete or of another model."
        )
    extra = [name for name in found if name not in known]
    if extra:
        raise ModelLoadError(
            f"{model_dir} holds {len(extra)} tensors that its configuration does not describe, the "
            f"first one is {extra[0]}; it may need something that is not implemented."
        )
    _check_experts_alike(found)


def _check_experts_alike(found: Mapping[str, StoredTensor]) -> None:
    stacks: dict[tuple[str, str], dict[bool, list[StoredTensor]]] = {}
    for name, stored in found.items():
        expert = EXPERT_NAME.fullmatch(name)
        if expert is not None:
            forms = stacks.setdefault((expert["module"], expert["matrix"]), {})
            forms.setdefault(stored.dtype in BYTE_DTYPES, []).append(stored)
    for forms in stacks.values():
        if len(forms) == 1:
            continue
        few, many = sorted(forms.values(), key=len)
        raise ModelLoadError(
            f"{few[0].key} in {few[0].file} is stored as {few[0].dtype}, but {len(many)} other experts "
            f"of its layer as {many[0].dtype}: either all must be packed FP4 or none."
        )


def _check_shape(stored: StoredTensor, expected: tuple[int, ...]) -> None:
    if stored.shape != expected:
        raise ModelLoadError(
            f"{stored.key} in {stored.file} has the shape {list(stored.shape)}, but the "
            f"configuration calls for {list(expected)}."
        )


def _unknown_storage(stored: StoredTensor, *, quantized: bool) -> str:
    message = f"{stored.key} in {stored.file} is stored as {stored.dtype}, "
    if stored.dtype not in _KNOWN_DTYPES:
        return message + "a type that is not known here."
    if quantized:
        return message + "a type that is not implemented for this tensor."
    return (
        message + "but config.json has no quantization_config, so only plain floats are expected."
    )
