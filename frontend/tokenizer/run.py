"""A tokenizer's process: `python -m frontend.tokenizer.run`, started by the daemon."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from pathlib import Path

import zmq

from frontend.settings import TokenizerSettings
from frontend.tokenizer.encoder import EncodedPrompt, PromptEncoder
from frontend.tokenizer.errors import PromptError, TokenizerLoadError
from frontend.tokenizer.load import load_tokenizer
from transport.child import StopFlag
from transport.framing import token_frame
from transport.links.daemon import DaemonLink
from transport.links.router import RouterLink
from transport.messages.base import Hello, HelloAnswer
from transport.messages.from_daemon import TOKENIZER_NOTICES, TokenizerNotice
from transport.messages.generate import Encode, Encoded, RequestFailed
from transport.messages.to_tokenizer import TO_TOKENIZER, ToTokenizer
from transport.process import Process, run_process
from transport.sockets import DealerSocket
from transport.telemetry import catalog
from transport.telemetry.metrics import MetricSet

BLOCKED_POLL_MS = 10
"""While the router does not read, whose reading again wakes nobody."""
BATCH = 64
"""Prompts taken from the socket before the main loop counts as having made a turn."""

log = logging.getLogger(__name__)


class TokenizerLoop:
    """Encodes one prompt after the other. Owns neither socket nor encoder."""

    def __init__(
        self,
        encoder: PromptEncoder,
        router: DealerSocket[HelloAnswer | ToTokenizer],
        hello: Hello,
        router_lost: threading.Event,
        daemon: DaemonLink[TokenizerNotice],
        metrics: MetricSet,
    ) -> None:
        """`router_lost` is set when there is a new router, which does not know this process."""
        self._encoder = encoder
        self._router = RouterLink(router, hello, self, router_lost)
        self._daemon = daemon
        self._prompts = metrics.counter(catalog.TOKENIZER_PROMPTS)
        self._tokens = metrics.counter(catalog.TOKENIZER_TOKENS)
        self._failures = metrics.counter(catalog.TOKENIZER_FAILURES)

    def run(self, stop: StopFlag, idle_seconds: float) -> None:
        """Serve until `stop` is set.

        Raises:
            RouterRefusedError: the router does not take this process.
        """
        poller = zmq.Poller()
        poller.register(stop.fd, zmq.POLLIN)
        self._router.connect(poller)
        while not stop.is_set():
            poller.poll(BLOCKED_POLL_MS if not self._router.flush() else round(idle_seconds * 1000))
            self._router.turn(BATCH)
            self._daemon.tick()

    def on_welcome(self) -> None:
        self._daemon.set_state("ready")

    def on_router_lost(self) -> None:
        self._daemon.set_state("loading", "joining the new router")

    def on_message(self, job: ToTokenizer, frames: list[zmq.Frame]) -> None:
        self._encode(job, bytes(frames[0].buffer))

    def _encode(self, job: Encode, payload: bytes) -> None:
        self._prompts.add()
        try:
            prompt = self._encode_prompt(job, payload)
        except PromptError as error:
            self._failures.add()
            self._router.send(
                RequestFailed(job.request_id, 400, error.code, str(error), error.param)
            )
            return
        # A fault of a template or of the tokenizer must end one request, not this process, which
        # would get the same prompt again.
        except Exception:
            self._failures.add()
            log.exception("%s: the prompt could not be encoded", job.request_id)
            message = "The server failed to encode the prompt; its log says why."
            self._router.send(RequestFailed(job.request_id, 500, "tokenizer_failed", message))
            return
        self._tokens.add(len(prompt.ids))
        reply = Encoded(job.request_id, prompt.render_seconds, prompt.encode_seconds)
        self._router.send(reply, token_frame(prompt.ids))

    def _encode_prompt(self, job: Encode, payload: bytes) -> EncodedPrompt:
        if job.kind == "chat":
            return self._encoder.encode_chat(payload)
        return self._encoder.encode_text(payload.decode("utf-8"), job.add_special_tokens)


def main() -> int:
    return run_process(TokenizerSettings, TOKENIZER_NOTICES, _serve, fatal=(TokenizerLoadError,))


def _serve(process: Process[TokenizerSettings, TokenizerNotice]) -> None:
    settings, daemon = process.settings, process.daemon
    router = process.router_socket(TO_TOKENIZER)
    router_lost = threading.Event()
    daemon.start(lambda notice, frames: router_lost.set())  # a tokenizer is told of nothing else
    daemon.set_state("loading", "loading the tokenizer")
    encoder = PromptEncoder(load_tokenizer(Path(settings.model_dir)))
    encoder.encode_text("warm up", add_special_tokens=False)
    gc.freeze()
    hello = settings.process.hello()
    loop = TokenizerLoop(encoder, router, hello, router_lost, daemon, process.metrics)
    loop.run(process.stop, settings.process.heartbeat_seconds)


if __name__ == "__main__":
    sys.exit(main())
