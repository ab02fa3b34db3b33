"""A tokenizer's process: `python -m frontend.tokenizer.run`, started by the daemon."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from frontend.settings import TokenizerSettings
from frontend.tokenizer.encoder import EncodedPrompt, PromptEncoder
from frontend.tokenizer.errors import PromptError
from frontend.tokenizer.forked_encode import Answer, ForkedEncode
from frontend.tokenizer.load import load_tokenizer
from transport.child import StopFlag
from transport.frame_limits import REPORT_BYTES
from transport.framing import read_tokens, token_frame
from transport.ids import RequestId
from transport.links.daemon import DaemonLink
from transport.links.router import RouterLink
from transport.logs import Seldom
from transport.messages.base import Hello, HelloAnswer
from transport.messages.from_daemon import TOKENIZER_NOTICES, TokenizerNotice
from transport.messages.generate import Cancel, Encode, Encoded, RequestFailed
from transport.messages.to_tokenizer import TO_TOKENIZER, ToTokenizer
from transport.model_files import ModelError
from transport.process import Process, run_process
from transport.prompt_turns import LONG_PROMPT_BYTES, PromptTurns
from transport.sockets import DealerSocket
from transport.telemetry import catalog
from transport.telemetry.metrics import MetricSet

BLOCKED_POLL_MS = 10
"""While the router does not read, whose reading again wakes nobody."""
CLIENT_CLOSED_REQUEST = 499
"""Status of a prompt that was cancelled; tells the router that it is held here no longer."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prompt:
    job: Encode
    payload: zmq.Frame


class TokenizerLoop:
    """Encodes prompts: a short one a turn itself, so that the router is listened to between two of
    them; the long ones one after the other in a fork. Owns the fork, but neither socket nor encoder."""

    def __init__(
        self,
        encoder: PromptEncoder,
        router: DealerSocket[HelloAnswer | ToTokenizer],
        hello: Hello,
        router_lost: threading.Event,
        daemon: DaemonLink[TokenizerNotice],
        metrics: MetricSet,
        max_frame: int = REPORT_BYTES,
    ) -> None:
        """`router_lost` is set when there is a new router, which does not know this process. `max_frame`:
        bytes of token ids that it may be sent."""
        self._encoder = encoder
        self._max_frame = max_frame
        self._router: RouterLink[ToTokenizer] = RouterLink(router, hello, self, router_lost)
        self._daemon = daemon
        self._poller = zmq.Poller()
        self._short: PromptTurns[_Prompt] = PromptTurns()
        self._long: PromptTurns[_Prompt] = PromptTurns()
        self._fork: ForkedEncode | None = None
        self._tracebacks = Seldom()
        self._prompts = metrics.counter(catalog.TOKENIZER_PROMPTS)
        self._tokens = metrics.counter(catalog.TOKENIZER_TOKENS)
        self._failures = metrics.counter(catalog.TOKENIZER_FAILURES)

    def run(self, stop: StopFlag, idle_seconds: float) -> None:
        """Serve until `stop` is set.

        Raises:
            RouterRefusedError: the router does not take this process.
        """
        self._poller.register(stop.fd, zmq.POLLIN)
        self._router.connect(self._poller)
        while not stop.is_set():
            self._poller.poll(self._poll_ms(idle_seconds))
            self._router.turn()
            self.work()
            self._daemon.tick()

    def close(self) -> None:
        self._end_fork()

    def on_welcome(self) -> None:
        self._daemon.set_state("ready")

    def on_router_lost(self) -> None:
        self._short.clear()
        self._long.clear()
        self._end_fork()
        self._daemon.set_state("loading", "joining the new router")

    def on_message(self, message: ToTokenizer, frames: list[zmq.Frame]) -> None:
        match message:
            case Cancel(request_id):
                self._cancel(request_id)
            case job:
                size = len(frames[0])
                turns = self._long if size > LONG_PROMPT_BYTES else self._short
                turns.add(job.request_id, _Prompt(job, frames[0]), time.monotonic(), size)

    @property
    def has_short(self) -> bool:
        return bool(self._short)

    @property
    def fork_fd(self) -> int | None:
        """Becomes readable when there is something of the long prompt under way."""
        return None if self._fork is None else self._fork.fd

    def work(self) -> None:
        """Encode one short prompt, and see to the long one under way."""
        prompt = self._short.first()
        if prompt is not None:
            self._short.pop(prompt.job.request_id)
            self._send(self._encode(prompt))
        if self._fork is not None:
            answer = self._fork.read()
            if answer is not None:
                self._end_fork()
                self._send(answer)
        if self._fork is None and (prompt := self._long.first()) is not None:
            self._long.pop(prompt.job.request_id)
            self._begin_fork(prompt)

    def _poll_ms(self, idle_seconds: float) -> int:
        if self._short:
            return 0
        return round(idle_seconds * 1000) if self._router.flush() else BLOCKED_POLL_MS

    def _begin_fork(self, prompt: _Prompt) -> None:
        request_id = prompt.job.request_id
        try:
            self._fork = ForkedEncode(request_id, partial(self._encode, prompt))
        except OSError as error:
            log.error("%s: no process for its prompt: %s", request_id, error)
            message = "The server has no memory or process for so long a prompt now: try again."
            self._send(Answer(RequestFailed(request_id, 503, "tokenizer_busy", message)))
        else:
            self._poller.register(self._fork.fd, zmq.POLLIN)

    def _end_fork(self) -> None:
        if self._fork is not None:
            self._poller.unregister(self._fork.fd)
            self._fork.close()
            self._fork = None

    def _cancel(self, request_id: RequestId) -> None:
        if self._fork is not None and self._fork.request_id == request_id:
            self._end_fork()
        elif self._short.pop(request_id) is None and self._long.pop(request_id) is None:
            return  # it was answered before
        message = "The request was cancelled."
        self._router.send(RequestFailed(request_id, CLIENT_CLOSED_REQUEST, "cancelled", message))

    def _send(self, answer: Answer) -> None:
        self._prompts.add()
        match answer.message:
            case Encoded():
                (ids,) = answer.frames
                self._tokens.add(len(read_tokens(ids)))
            case RequestFailed():
                self._failures.add()
        self._router.send(answer.message, *answer.frames)

    def _encode(self, prompt: _Prompt) -> Answer:
        job = prompt.job
        try:
            encoded = self._encode_payload(job, bytes(prompt.payload.buffer))
        except PromptError as error:
            return Answer(RequestFailed(job.request_id, 400, error.code, str(error), error.param))
        # A fault of a template or of the tokenizer must end one request, not this process, which
        # would get the same prompt again.
        except Exception as error:
            text = "%s: the prompt could not be encoded: %r"
            log.error(text, job.request_id, error, exc_info=self._tracebacks.allows())
            message = "The server failed to encode the prompt; its log says why."
            return Answer(RequestFailed(job.request_id, 500, "tokenizer_failed", message))
        if encoded.ids.nbytes > self._max_frame:
            message = f"The prompt has {len(encoded.ids)} tokens, more than any model takes."
            return Answer(RequestFailed(job.request_id, 400, "context_length_exceeded", message))
        timed = Encoded(job.request_id, encoded.render_seconds, encoded.encode_seconds)
        return Answer(timed, (token_frame(encoded.ids),))

    def _encode_payload(self, job: Encode, payload: bytes) -> EncodedPrompt:
        if job.kind == "chat":
            return self._encoder.encode_chat(payload)
        return self._encoder.encode_text(payload.decode("utf-8"), job.add_special_tokens)


def main() -> int:
    return run_process(TokenizerSettings, TOKENIZER_NOTICES, _serve, fatal=(ModelError,))


def _serve(process: Process[TokenizerSettings, TokenizerNotice]) -> None:
    settings, daemon = process.settings, process.daemon
    router = process.router_socket(TO_TOKENIZER)
    router_lost = threading.Event()
    daemon.start(lambda notice, frames: router_lost.set())  # a tokenizer is told of nothing else
    daemon.set_state("loading", "loading the tokenizer")
    encoder = PromptEncoder(load_tokenizer(Path(settings.model_dir)))
    encoder.warm_up()
    gc.freeze()
    hello = settings.process.hello()
    max_frame = settings.process.max_frame
    loop = TokenizerLoop(encoder, router, hello, router_lost, daemon, process.metrics, max_frame)
    with closing(loop):
        loop.run(process.stop, settings.process.heartbeat_seconds)


if __name__ == "__main__":
    sys.exit(main())
