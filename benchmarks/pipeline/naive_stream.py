"""The baseline of the streaming benchmark: what a server does that sends one chunk per token.

No engine, no ZMQ, no detokenizer: a Starlette StreamingResponse whose generator serialises each
chunk with `json.dumps` and yields it. `python -m benchmarks.pipeline.naive_stream PORT [STEP_SECONDS]`:
with a step time, every stream yields one chunk a step, all streams at the same moments.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

COMPACT = (",", ":")
STEP_SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


async def next_step() -> None:
    """Wait for the next multiple of the step time, or give the other streams a turn."""
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(STEP_SECONDS - now % STEP_SECONDS if STEP_SECONDS else 0)


async def chunks(count: int) -> AsyncIterator[str]:
    for number in range(count):
        chunk = {
            "id": "chatcmpl-0123456789abcdef0123456789abcdef",
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": "SmolLM2-135M-Instruct",
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": f" word{number}"},
                    "logprobs": None,
                    "finish_reason": None,
                }
            ],
        }
        yield f"data: {json.dumps(chunk, separators=COMPACT)}\n\n"
        await next_step()
    yield "data: [DONE]\n\n"


async def chat(request: Request) -> StreamingResponse:
    body = await request.json()
    return StreamingResponse(chunks(body["max_tokens"]), media_type="text/event-stream")


app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools")
