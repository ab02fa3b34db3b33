"""A model as the engine sees it: first `LoadedModel`, its weights, then `ServedModel`, with caches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from hicache.copies.cache_copies import StateCodec
from hicache.layout import CacheLayout
from workers.attention.batch import Batch, BatchTensors, StepUpload
from workers.settings import EngineSettings

_UNNAMED_LENGTH: Final = 4096
"""Context length where neither the user nor the model's configuration names one."""

_log = logging.getLogger(__name__)


class ServedModel(Protocol):
    """A model with caches. It computes one step at a time: `prepare`, then `forward`."""

    @property
    def pages(self) -> Tensor:
        """The page pool, uint8 [num_pages, page_bytes]."""
        ...

    @property
    def states(self) -> StateCodec | None:
        """Cuts states out and puts them back. None: the model keeps no state beside its pages."""
        ...

    @property
    def captures_decodes(self) -> bool:
        """Whether a graph can capture `forward` for a decode step of any sequences, padded or not.

        Then `prepare` puts nothing for decodes, and `forward` leaves out rows at position -1.
        """
        ...

    def prepare(self, batch: Batch, upload: StepUpload) -> None:
        """Note what the host needs for the step, and put in `upload` what the device needs beyond
        `BatchTensors`.
        """
        ...

    def forward(self, tensors: BatchTensors) -> Tensor | None:
        """Do the device's part of the prepared step. Call it once the step's upload is sent.

        It writes the caches and returns the logits [R,vocab_size] of `Batch.logit_rows`, in any float type,
        or None if there are none.

        It only enqueues work, and reads whatever changes from step to step from `tensors` and from what was
        put, so a graph can capture it.
        """
        ...

    def collected(self, slots: list[int], tokens: Tensor) -> None:
        """Receive the tokens that a step sampled for `slots`, int64 on the host. Called in step order."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """Weights on a device, and what an engine over them offers."""

    layout: CacheLayout
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    needs_tokens_on_host: bool
    """A decode step is prepared from tokens that the step before sampled: steps cannot overlap."""
    serve: Callable[[int, int], ServedModel]
    """Allocates caches of (number of pages, number of slots)."""
    close: Callable[[], None] = lambda: None
    """Stops what runs beside the steps, and closes the model's files."""


@dataclass(frozen=True)
class LoadObserver:
    report: Callable[[str], None] = lambda _line: None
    """Called with one line of text at each stage."""
    check_layout: Callable[[CacheLayout], None] = lambda _layout: None
    """Called before the weights are loaded, to have a layout that cannot be served refused by then
    (`ModelLoadError`). The fingerprint is not final yet."""


LoadModel = Callable[[EngineSettings, torch.device, LoadObserver], LoadedModel]
"""Loads a model; raises `ModelLoadError`, whose one sentence says why it cannot be loaded or served here."""


def choose_context_length(wanted: int | None, limit: int | None) -> int:
    if wanted is None:
        return limit or _UNNAMED_LENGTH
    if limit is not None and wanted > limit:
        _log.warning(
            "The context length of %d tokens exceeds the %d of the model's configuration; "
            "output may degrade beyond that.",
            wanted,
            limit,
        )
    return wanted
