"""The `CacheLayout` of a V4.1 engine: the serving layout and a fingerprint of all that it depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Final

from hicache.layout import CacheLayout
from workers.contract import PAGE_TOKENS
from workers.models.deepseek_v41.layout.row_layout import build_row_layout

if TYPE_CHECKING:
    from workers.models.deepseek_v41.config.model_config import ModelConfig
    from workers.models.deepseek_v41.layout.row_layout import RowLayout

COMPUTE_VERSION: Final = 1
"""Enters the fingerprint. Raise it with a change of code that may change the numbers in a page or a state of
the same model; what another version stored is then never hit."""


def build_cache_layout(
    config: ModelConfig, layout: RowLayout, keep_tokens: int, dtype: str, identity: str
) -> CacheLayout:
    """Describe the caches to whoever copies them.

    Args:
        config: the model.
        layout: layout of its caches.
        keep_tokens: bounded replay; 0: off.
        dtype: compute type.
        identity: digest of the weights and of the token map.
    """
    # Rings that are longer here than in a stored state change nothing for those who exchange rows.
    plain = build_row_layout(config, layout.kv_format, keep_tokens, store_anchors=False)
    facts = {
        "version": COMPUTE_VERSION,
        "config": dataclasses.asdict(config),
        "weights": identity,
        "dtype": dtype,
        "kv_format": layout.kv_format,
        "keep_tokens": keep_tokens,
        "page_bytes": plain.page_bytes,
        "page_tensors": plain.page_tensors,
        "state_tensors": plain.state_tensors,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return CacheLayout(
        page_tokens=PAGE_TOKENS,
        page_bytes=layout.page_bytes,
        page_tensors=layout.page_tensors,
        state_bytes=layout.state_bytes,
        state_tensors=layout.state_tensors,
        stored_state_bytes=layout.stored_state_bytes,
        replay_tokens=max(1, keep_tokens),
        keep_tokens=keep_tokens,
        fingerprint=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    )
