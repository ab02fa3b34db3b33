"""Messages from the router to tokenizers."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.messages.base import HelloAnswer
from transport.messages.generate import Encode

ToTokenizer = Encode
TO_TOKENIZER: Final[Decoder[HelloAnswer | ToTokenizer]] = Decoder(HelloAnswer | ToTokenizer)
