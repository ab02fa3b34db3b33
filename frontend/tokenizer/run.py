"""A tokenizer's process: `python -m frontend.tokenizer.run`, started by the daemon."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from pathlib import Path

import zmq

from frontend.settings import TokenizerSettings
from frontend.tokenizer.encoder import EncodedPrompt, PromptEncoder
from frontend.tokenizer.errors import PromptError, TokenizerLoadError
from frontend.tokenizer.load import load_tokenizer
from transport.child import EXIT_FATAL, StopFlag, enter_process
from transport.framing import BadMessage, token_frame
from transport.links.daemon import (
    DaemonLink,
    LinkError,
    RouterLossNotice,
    RouterRefusedError,
    SocketTelemetry,
    exit_code_of,
)
from transport.messages.base import PROTOCOL_VERSION, Hello, Refused, Welcome
from transport.messages.generate import Encode, Encoded, RequestFailed
from transport.sockets import DealerSocket, Endpoints, Received
from transport.telemetry.metrics import Counter, MetricSet

BATCH = 64
"""Prompts taken from the socket before the main loop counts as having made a turn."""

log = logging.getLogger(__name__)


class TokenizerLoop:
    """Encodes one prompt after the other. Owns neither socket nor encoder."""

    def __init__(
        self, encoder: PromptEncoder, dealer: DealerSocket, link: DaemonLink, metrics: MetricSet
    ) -> None:
        self._encoder = encoder
        self._dealer = dealer
        self._link = link
        self._prompts = metrics.counter("tokenizer_prompts")
        self._tokens = metrics.counter("tokenizer_tokens")
        self._failures: Counter = metrics.counter("tokenizer_failures")

    def run(
        self, stop: StopFlag, hello: Hello, router_lost: threading.Event, idle_seconds: float
    ) -> None:
        """Serve until `stop` is set. `router_lost` is set when there is a new router, which does not
        know this process.

        Raises:
            RouterRefusedError: the router does not take this process.
        """
        poller = zmq.Poller()
        poller.register(self._dealer.socket, zmq.POLLIN)
        poller.register(stop.fd, zmq.POLLIN)
        self._dealer.send(hello)
        while not stop.is_set():
            poller.poll(round(idle_seconds * 1000))
            if router_lost.is_set():
                router_lost.clear()
                self._link.set_state("loading", "joining the new router")
                self._dealer.send(hello)
            try:
                for received in self._dealer.drain(BATCH):
                    self._handle(received)
            except BadMessage:
                log.exception("dropped a message that cannot be decoded")
            self._link.tick()

    def _handle(self, received: Received) -> None:
        match received.message:
            case Encode() as job:
                self._encode(job, bytes(received.frames[0].buffer))
            case Welcome():
                self._link.set_state("ready")
            case Refused(reason):
                raise RouterRefusedError(f"the router refused this tokenizer: {reason}")
            case other:
                log.warning("ignored a %s", type(other).__name__)

    def _encode(self, job: Encode, payload: bytes) -> None:
        self._prompts.add()
        try:
            prompt = self._encode_prompt(job, payload)
        except PromptError as error:
            self._failures.add()
            self._dealer.send(
                RequestFailed(job.request_id, 400, error.code, str(error), error.param)
            )
            return
        # A fault of a template or of the tokenizer must end one request, not this process, which
        # would get the same prompt again.
        except Exception:
            self._failures.add()
            log.exception("%s: the prompt could not be encoded", job.request_id)
            message = "The server failed to encode the prompt; its log says why."
            self._dealer.send(RequestFailed(job.request_id, 500, "tokenizer_failed", message))
            return
        self._tokens.add(len(prompt.ids))
        reply = Encoded(job.request_id, prompt.render_seconds, prompt.encode_seconds)
        self._dealer.send(reply, token_frame(prompt.ids))

    def _encode_prompt(self, job: Encode, payload: bytes) -> EncodedPrompt:
        if job.kind == "chat":
            return self._encoder.encode_chat(payload)
        return self._encoder.encode_text(payload.decode("utf-8"), job.add_special_tokens)


def main() -> int:
    """Load the tokenizer, then serve until SIGTERM. Returns the exit code."""
    settings, stop = enter_process(TokenizerSettings)
    process = settings.process
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = DealerSocket(context, Endpoints(process.run_dir).router, process.name)
    metrics = MetricSet()
    router_lost = RouterLossNotice()
    link = DaemonLink(context, process, metrics, SocketTelemetry(dealer), router_lost.notice)
    try:
        link.start()
        link.set_state("loading", "loading the tokenizer")
        encoder = PromptEncoder(load_tokenizer(Path(settings.model_dir)))
        encoder.encode_text("warm up", add_special_tokens=False)
        gc.freeze()
        loop = TokenizerLoop(encoder, dealer, link, metrics)
        hello = Hello(PROTOCOL_VERSION, "tokenizer", process.name, os.getpid(), process.config_hash)
        loop.run(stop, hello, router_lost.event, process.heartbeat_seconds)
        return 0
    except TokenizerLoadError as error:
        log.error("%s", error)
        link.fatal(str(error))
        return EXIT_FATAL
    except RouterRefusedError as error:
        link.fatal(str(error))
        return exit_code_of(error)
    except LinkError as error:
        return exit_code_of(error)
    finally:
        link.close()
        dealer.close()
        context.term()


if __name__ == "__main__":
    sys.exit(main())
