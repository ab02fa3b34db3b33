"""What an engine's cache consists of, as far as those must know who keep it elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSlice:
    """One tensor inside a page row or a state row: byte offset, shape, dtype name (`float32`)."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CacheLayout:
    """What a device page and the state of a sequence consist of.

    A page is ONE contiguous row of `page_bytes` bytes with all layers' KV of its `page_tokens` tokens,
    a state one contiguous row of `state_bytes` (0: the model has none), so that a host page equals a
    device row and a copy is one run of bytes.
    """

    page_tokens: int
    page_bytes: int
    page_tensors: tuple[TensorSlice, ...]
    state_bytes: int = 0
    state_tensors: tuple[TensorSlice, ...] = ()
    stored_state_bytes: int = 0
    """Size of the part of a state that a prefix cache keeps, in the form that it keeps; 0: none."""
    replay_tokens: int = 1
    """Trailing prompt tokens that must be recomputed after a prefix hit."""
    keep_tokens: int = 0
    """Bounded replay: the last prompt tokens that the decoder layers run on; 0: on all."""
    fingerprint: str = ""
    """Hash over model configuration, weights identity, dtypes and this layout."""
