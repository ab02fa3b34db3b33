"""Every message that crosses a process border, in one versioned place.

A message on the wire is `[header][payload frame ...]`: the header is one of the structs below,
msgpack-encoded as a tagged array; bulk data (token ids, logprobs, prompt bodies) follows in raw
frames that are never copied into the header. `doc/wire_protocol.md` tells the same as a table.

Fields are only ever appended: the array form is positional. `PROTOCOL_VERSION` changes when an
old peer could misread a new message; peers of another version refuse each other in `Hello`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from transport.ids import ProcessName, RequestId
from transport.telemetry_values import HistogramValue, QueueStats, SocketStats

PROTOCOL_VERSION: Final = 2

ALL_CHOICES: Final = -1
"""As a choice index: every choice of the request."""

Role = Literal["daemon", "router", "frontend", "tokenizer", "worker", "client"]
PromptKind = Literal["chat", "text", "tokens"]
ProcessState = Literal["starting", "loading", "ready", "draining", "stopping"]
InstanceState = Literal["starting", "ready", "degraded", "draining"]
CacheAction = Literal["report", "flush"]
CancelCause = Literal["client", "stop", "slow_reader", "shutdown", "failed"]
"""`failed`: on the server's side."""

# Finish codes of a row of a `TokenBatch`.
RUNNING: Final = 0
FINISH_STOP: Final = 1
"""The last token of the row is the end-of-sequence or a stop token; it is not part of the text."""
FINISH_LENGTH: Final = 2
FINISH_ABORT: Final = 3


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False, omit_defaults=True):
    """Base of all headers. The class name is the tag."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """How to choose the tokens of one choice. All values are validated by the frontend."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = no limit."""
    min_p: float = 0.0
    seed: int = 0
    """64-bit; always set (drawn at random by the frontend where the client gave none)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    """-1: none; k >= 0: the chosen token's logprob and the k most likely ones."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


# ---- every process -> router and daemon; first message of a connection -------------------------


class Hello(Message, frozen=True):
    """Who connects. Answered with `Welcome` or `Refused`."""

    version: int
    role: Role
    name: ProcessName
    pid: int
    config_hash: str


class Welcome(Message, frozen=True):
    """The peer is accepted."""


class Refused(Message, frozen=True):
    """The peer is not accepted; it must exit with this reason."""

    reason: str


# ---- worker -> router ---------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the other processes need to know of the model, found out by a worker that loaded it."""

    vocab_size: int
    """Number of logits: ids in `logit_bias` and `stop_token_ids` must be below it."""
    max_model_len: int
    """Prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    pool_tokens: int
    """Tokens that fit into the smallest rank's device pool."""


class WorkerReady(Message, frozen=True):
    """A worker has loaded its model and takes sequences."""

    rank: int
    model: ModelInfo
    max_num_seqs: int


class TokenBatch(Message, frozen=True):
    """All that one engine step yielded for one frontend. Row i: `request_ids[i]`, choice
    `indexes[i]`, `counts[i]` tokens, `finish[i]`.

    Frame 0: the rows' token ids, int32, concatenated in row order.
    Frame 1 (only if some `logprobs[i]` >= 0): per token of such a row 1 + 2k words of 4 bytes,
    k = `logprobs[i]`: chosen logprob (float32), k token ids (int32), k logprobs (float32).
    Logprobs are those of the model's own distribution, before temperature, penalties and bias.
    """

    frontend: ProcessName
    step: int
    request_ids: list[RequestId]
    indexes: list[int]
    counts: list[int]
    finish: list[int]
    logprobs: list[int] = []
    """Empty, or one entry a row: k, or -1 for a row without logprobs."""
    started: list[tuple[RequestId, int, int, int]] = []
    """(request, choice index, cached prompt tokens, prompt tokens) of sequences whose first chunk
    ran in this step. May name sequences that have no row."""


class SequenceFailed(Message, frozen=True):
    """A worker cannot go on with a choice; the router ends the whole request with this error."""

    request_id: RequestId
    index: int
    status: int
    code: str
    message: str


# ---- frontend -> router -------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """A new request. Frame 0: the prompt — for `chat` a JSON object
    `{"messages": [...], "tools": [...]|null, "template_kwargs": {...}}`, for `text` UTF-8,
    for `tokens` int32 ids."""

    request_id: RequestId
    kind: PromptKind
    sampling: SamplingParams
    received_at: float
    """CLOCK_MONOTONIC seconds at which the frontend had read the request."""
    n: int = 1
    priority: int = 0
    """Lower runs sooner."""
    affinity: str = ""
    """Conversation key: the same value prefers the same tokenizer and rank. Empty: none."""
    add_special_tokens: bool = True
    """For `text`: let the tokenizer add its own begin and end tokens."""
    prefix_cache: bool = True
    """Whether the prompt may be taken from the prefix cache and stored in it."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    call: RequestId = RequestId("")
    """The HTTP request, where this is one of its several prompts: `--max-waiting` counts it once."""


class Cancel(Message, frozen=True):
    """Stop working on a request or on one of its choices; idempotent. Also router -> worker."""

    request_id: RequestId
    index: int = ALL_CHOICES
    cause: CancelCause = "client"


class Throttle(Message, frozen=True):
    """Pause (or resume) a choice whose client reads too slowly. Also router -> worker."""

    request_id: RequestId
    index: int
    paused: bool


class Encode(Message, frozen=True):
    """Render and encode a prompt without running it. Frame 0 as for `Submit`.
    Also router -> tokenizer, for every request."""

    request_id: RequestId
    kind: PromptKind
    add_special_tokens: bool = True
    affinity: str = ""


# ---- tokenizer -> router (and router -> frontend where the frontend sent `Encode`) -----------------


class Encoded(Message, frozen=True):
    """Frame 0: token ids, int32."""

    request_id: RequestId
    render_seconds: float = 0.0
    encode_seconds: float = 0.0


class RequestFailed(Message, frozen=True):
    """A request ends without (further) tokens, with an error for the client. From a tokenizer to the
    router, and from the router to the frontend."""

    request_id: RequestId
    status: int
    """HTTP status."""
    code: str
    """Machine-readable, e.g. `context_length_exceeded`."""
    message: str
    param: str | None = None
    retry_after: int | None = None
    """Seconds, for 429 and 503."""


# ---- router -> worker ---------------------------------------------------------------------------


class Start(Message, frozen=True):
    """Run one choice. Frame 0: int32 ids of the prompt and of the tokens generated so far (there are
    some when the choice moves here from a lost worker)."""

    request_id: RequestId
    index: int
    frontend: ProcessName
    prompt_len: int
    sampling: SamplingParams
    priority: int
    arrival: float
    prefix_cache: bool = True
    cache_salt: str = ""


# ---- router -> frontend -------------------------------------------------------------------------


class Serving(Message, frozen=True):
    """What the router serves; sent after `Welcome` once known, and whenever it changes."""

    model: ModelInfo


class StageTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """CLOCK_MONOTONIC seconds at which a request entered each stage; 0.0 = never."""

    received: float = 0.0
    tokenizing: float = 0.0
    queued: float = 0.0
    running: float = 0.0
    finished: float = 0.0


class Finished(Message, frozen=True):
    """The router has closed its record of a request; follows its last `TokenBatch`."""

    request_id: RequestId
    stages: StageTimes
    rank: int


# ---- telemetry: every process -> daemon, PUB/SUB -------------------------------------------------


class RequestRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One live request as the router sees it, for `inspect requests`."""

    request_id: RequestId
    stage: str
    frontend: ProcessName
    rank: int
    prompt_tokens: int
    output_tokens: int
    choices: int
    stages: StageTimes
    stage_since: float = 0.0
    """CLOCK_MONOTONIC seconds at which it entered its present stage, for the last time."""


class Snapshot(Message, frozen=True):
    """State of one process. Metrics are cumulative, so that a lost snapshot loses nothing.

    A metric's key is (name, label value ...); the daemon knows each name's label names."""

    name: ProcessName
    pid: int
    state: ProcessState
    detail: str
    progress: int
    """Grows with every turn of the process's main loop: a hung process stops counting."""
    counters: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    gauges: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    histograms: dict[str, list[tuple[tuple[str, ...], HistogramValue]]] = {}
    sockets: list[SocketStats] = []
    queues: list[QueueStats] = []
    requests: list[RequestRow] = []
    """Router only; at most the first thousand."""


# ---- control: daemon <-> processes and clients (command line, frontends) -----------------------------


class StateChanged(Message, frozen=True):
    """A process tells the daemon that it is loading, ready, ... ; also the daemon's means to know
    why a start takes long."""

    state: ProcessState
    detail: str = ""


class FatalError(Message, frozen=True):
    """A process is about to exit for a reason that a restart would not cure."""

    reason: str


class InstanceStatus(Message, frozen=True):
    """Daemon -> frontends: may requests come in? Answered with `StatusHeld`."""

    state: InstanceState
    reason: str = ""
    serial: int = 0
    """0: nobody waits for the answer."""


class StatusHeld(Message, frozen=True):
    """Frontend -> daemon: it acts on the last `InstanceStatus`. Of `ready` that means that it lets
    requests in: it also knows what the router serves."""

    serial: int
    """Of that `InstanceStatus`."""


class PeerLost(Message, frozen=True):
    """A process is gone. Daemon -> router: whatever it held must go elsewhere. Of the router itself
    daemon -> workers and tokenizers: they drop its work and join the new one."""

    name: ProcessName
    comes_back: bool = True
    """Whether the daemon starts another one."""
    pid: int = 0
    """Which process of that name; 0: whichever there is."""


class Drain(Message, frozen=True):
    """Daemon -> frontends and router: take no new requests, finish the running ones."""


class Query(Message, frozen=True):
    """Ask the daemon: `status`, `processes`, `requests`, `queues`, `cache`, `sockets`, `metrics`,
    `state`. Answered with `Answer`."""

    what: str
    serial: int = 0


class Answer(Message, frozen=True):
    """Frame 0: the answer — JSON, or for `metrics` the Prometheus exposition text."""

    serial: int
    error: str = ""


class StopInstance(Message, frozen=True):
    """Client -> daemon: stop the instance. Answered with `Answer` at once; the stop itself is
    watched through the run directory's lock."""

    drain_timeout: float | None = None
    serial: int = 0


class DumpStacks(Message, frozen=True):
    """Where is every thread of a process? From a client to the daemon, which answers with `Answer`
    and the stacks, and from the daemon to the process."""

    serial: int
    process: ProcessName = ProcessName("")
    """Empty: all processes."""


class SetLogLevel(Message, frozen=True):
    """Log more or less from now on. On the same ways as `DumpStacks`."""

    level: str
    serial: int
    process: ProcessName = ProcessName("")


class CacheCommand(Message, frozen=True):
    """Tell about the host prefix cache of a worker (`report`), or empty it (`flush`). As `DumpStacks`,
    to workers only."""

    action: CacheAction
    serial: int
    process: ProcessName = ProcessName("")
    """Empty: all workers."""


ProcessCommand = DumpStacks | SetLogLevel | CacheCommand
"""What a client has the daemon pass on to processes."""


class CommandDone(Message, frozen=True):
    """Process -> daemon: a command has been carried out. Frame 0: empty, or JSON: the threads for
    `DumpStacks`, the cache's content for `CacheCommand`."""

    serial: int


# ---- tap: router -> whoever subscribes to `TAP_HEADERS` or `TAP_BODIES`, XPUB/SUB -----------------
# The topic is a frame of its own, before the header.

TAP_HEADERS: Final = b"headers"
TAP_BODIES: Final = b"bodies"


class TapOpened(Message, frozen=True):
    """Somebody taps from now on; all that tap the same topic are told."""

    serial: int
    """Of the next `Tapped`."""


class Tapped(Message, frozen=True):
    """One message that passed the router. With `TAP_BODIES` it follows: its header, and the
    beginning of each of its payload frames."""

    serial: int
    """Counts up by one: a gap is what the tapper was too slow for."""
    at: float
    """Unix time."""
    sender: ProcessName
    receiver: ProcessName
    kind: str
    """Name of the message."""
    request_ids: list[RequestId]
    header_bytes: int
    frame_bytes: list[int]


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | WorkerReady
    | TokenBatch
    | SequenceFailed
    | Submit
    | Cancel
    | Throttle
    | Encode
    | Encoded
    | RequestFailed
    | Start
    | Serving
    | Finished
    | Snapshot
    | StateChanged
    | FatalError
    | InstanceStatus
    | StatusHeld
    | PeerLost
    | Drain
    | Query
    | Answer
    | StopInstance
    | DumpStacks
    | SetLogLevel
    | CacheCommand
    | CommandDone
    | TapOpened
    | Tapped
)
