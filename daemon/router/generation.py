"""The router's record of one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from transport.framing import Payload, TokenArray, payload_bytes, token_frame
from transport.ids import NO_RANK, DpRank, ProcessName, RequestId
from transport.messages.generate import Encode, StageTimes
from transport.messages.telemetry import RequestRow
from transport.messages.to_router import Submit
from transport.messages.to_worker import Start

Stage = Literal["received", "tokenizing", "queued", "running", "finished"]


@dataclass
class Choice:
    """One of the `n` answers to a prompt."""

    output: list[int] = field(default_factory=list)
    """Tokens that the client has, for going on elsewhere if the worker is lost."""
    done: bool = False
    paused: bool = False
    """The client reads too slowly; also holds where the choice goes on if the worker is lost."""


@dataclass(eq=False)
class Generation:
    """One prompt and its choices, from `Submit` to the end; or from `Encode`, which wants no choices
    but the prompt's tokens."""

    message: Submit | Encode
    """As the frontend sent it, but for the output's length, which is cut to what fits."""
    frontend: ProcessName
    prompt_frame: Payload
    """The prompt as the client sent it; dropped when it is encoded."""
    choices: list[Choice]
    received_at: float
    stage: Stage = "received"
    stage_since: float = 0.0
    tokenizing_at: float = 0.0
    queued_at: float = 0.0
    running_at: float = 0.0
    tokenizer: ProcessName | None = None
    rank: DpRank = NO_RANK
    prompt: TokenArray | None = None
    prompt_bytes: int = 0
    """Size of the prompt as the client sent it."""
    losses: int = 0
    """Processes that it may have killed; 0 again when it has got on with its work after that."""
    tokens_on_trial: int = 0
    """Tokens since it was given to a worker as a suspect."""

    @classmethod
    def of(
        cls, message: Submit | Encode, frontend: ProcessName, frame: Payload, now: float
    ) -> Generation:
        size = payload_bytes(frame)
        if isinstance(message, Encode):
            return cls(message, frontend, frame, [], received_at=now, prompt_bytes=size)
        choices = [Choice() for _ in range(message.n)]
        return cls(message, frontend, frame, choices, message.received_at, prompt_bytes=size)

    @property
    def request_id(self) -> RequestId:
        return self.message.request_id

    @property
    def call(self) -> RequestId:
        """The HTTP request that it belongs to; its own id, unless that has several prompts."""
        return (isinstance(self.message, Submit) and self.message.call) or self.request_id

    def enter(self, stage: Stage, now: float) -> None:
        """Note the change of stage; the first entry of each stage counts."""
        self.stage = stage
        self.stage_since = now
        if stage == "tokenizing":
            self.tokenizing_at = self.tokenizing_at or now
        elif stage == "queued":
            self.queued_at = self.queued_at or now
        elif stage == "running":
            self.running_at = self.running_at or now

    @property
    def call_choices(self) -> int:
        """Choices of the HTTP request that it belongs to."""
        return (isinstance(self.message, Submit) and self.message.call_choices) or len(self.choices)

    @property
    def is_paused(self) -> bool:
        """Whether no choice of it is computed, for its client reads too slowly."""
        live = [choice for choice in self.choices if not choice.done]
        return bool(live) and all(choice.paused for choice in live)

    @property
    def is_waiting(self) -> bool:
        """Whether it counts against `--max-waiting`."""
        return self.stage in ("received", "tokenizing", "queued")

    @property
    def open_choices(self) -> int:
        return sum(not choice.done for choice in self.choices)

    def stage_times(self, finished: float = 0.0) -> StageTimes:
        return StageTimes(
            self.received_at, self.tokenizing_at, self.queued_at, self.running_at, finished
        )

    def tokens_so_far(self, index: int) -> memoryview:
        assert self.prompt is not None
        output = self.choices[index].output
        if not output:
            return token_frame(self.prompt)
        return token_frame(np.concatenate([self.prompt, np.asarray(output, dtype=np.int32)]))

    def encode(self) -> Encode:
        wanted = self.message
        return Encode(wanted.request_id, wanted.kind, wanted.add_special_tokens, wanted.affinity)

    def start(self, index: int) -> Start:
        """What has a worker run a choice; `tokens_so_far` is its frame."""
        assert isinstance(self.message, Submit) and self.prompt is not None
        return Start(
            request_id=self.request_id,
            index=index,
            frontend=self.frontend,
            prompt_len=len(self.prompt),
            generate=self.message.generate,
            arrival=self.received_at,
        )

    def row(self) -> RequestRow:
        return RequestRow(
            request_id=self.request_id,
            stage=self.stage,
            frontend=self.frontend,
            rank=self.rank,
            prompt_tokens=0 if self.prompt is None else len(self.prompt),
            output_tokens=sum(len(choice.output) for choice in self.choices),
            choices=len(self.choices),
            stages=self.stage_times(),
            stage_since=self.stage_since,
        )
