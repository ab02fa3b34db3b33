"""Messages from the router to tokenizers. Each `Encode` is answered once, also if it is cancelled."""

from __future__ import annotations

from typing import Final

from msgspec.msgpack import Decoder

from transport.messages.base import HelloAnswer
from transport.messages.generate import Cancel, Encode

ToTokenizer = Encode | Cancel
TO_TOKENIZER: Final[Decoder[HelloAnswer | ToTokenizer]] = Decoder(HelloAnswer | ToTokenizer)
