"""Keys of pages: a chain of 128-bit hashes, so that equal keys mean equal tokens from position 0 on.

The first link hashes the model's fingerprint and the request's cache salt, every further one its
parent's key and the token ids of one page. Nobody can find two prompts with one key, so content is
never compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from transport.framing import TokenArray

KEY_BYTES: Final = 16
_ROOT: Final = b"hicache root"
_PAGE: Final = b"hicache page"


@dataclass(frozen=True)
class PromptKeys:
    """A prompt as the cache sees it. Computed once per request, then used for every call."""

    num_tokens: int
    keys: tuple[bytes, ...]
    """One per full page, in order."""


def root_key(fingerprint: str, salt: str) -> bytes:
    model, tenant = fingerprint.encode(), salt.encode()
    lengths = len(model).to_bytes(8, "little")  # keeps ("ab", "c") and ("a", "bc") apart
    return blake2b(lengths + model + tenant, digest_size=KEY_BYTES, person=_ROOT).digest()


def prompt_keys(tokens: TokenArray, *, fingerprint: str, salt: str, page_tokens: int) -> PromptKeys:
    """Hash the full pages of `tokens` (int32, shape [n]); about 2 µs a page."""
    data = memoryview(tokens.astype("<i4").tobytes())
    step = page_tokens * 4
    key = root_key(fingerprint, salt)
    keys = []
    for start in range(0, len(data) - step + 1, step):
        page = blake2b(key, digest_size=KEY_BYTES, person=_PAGE)
        page.update(data[start : start + step])
        key = page.digest()
        keys.append(key)
    return PromptKeys(len(tokens), tuple(keys))
