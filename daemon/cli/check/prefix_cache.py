"""`deepinfer check prefix-cache`: is an answer with the prefix cache the answer without it?"""

from __future__ import annotations

import secrets
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from daemon.cli.check.api_client import (
    CHAT,
    COMPLETIONS,
    ApiClient,
    JsonBody,
    RequestFailed,
    StreamedAnswer,
)
from daemon.cli.check.sample_text import SampleText
from daemon.cli.output import plain_table, print_json, table_console
from daemon.cli.units import duration, number
from daemon.errors import DeepInferError

EXIT_EQUAL: Final = 0
EXIT_DIFFERENT: Final = 1
EXIT_NOT_CHECKED: Final = 2
"""The server cannot be reached, or has no cache to check."""

NO_CHAT_TEMPLATE: Final = "no_chat_template"
"""Code of the error with which such a model answers a conversation."""
PROBE_TOKENS: Final = 384
"""Length of a prompt that any cache must know the second time."""
MOST_PROBES: Final = 4
SHOWN_CHARACTERS: Final = 30


class Turn(msgspec.Struct, frozen=True):
    """One turn, answered twice."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    ttft_off_seconds: float
    """Time to the first token without the cache."""
    ttft_on_seconds: float
    speedup: float
    """The former over the latter."""
    equal: bool
    difference: str = ""
    """Where the two answers part."""


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    url: str
    model: str
    equal: bool
    hit_share: float
    """Cached over prompt tokens, of all turns."""
    turns: list[Turn]


@dataclass(frozen=True)
class Workload:
    """How the conversations look. Lengths in tokens, about."""

    turns: int
    conversations: int
    prompt_tokens: int
    turn_tokens: int
    max_tokens: int
    seed: int


@dataclass
class Conversation:
    """A growing one."""

    salt: str
    """Never used before: the first turn misses."""
    chat: bool
    """Whether it is sent as messages; otherwise as one text that grows."""
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def prompt(self) -> JsonBody:
        """The field of the body that holds what has been said so far."""
        if self.chat:
            return {"messages": self.messages}
        return {"prompt": "\n".join(message["content"] for message in self.messages)}


def ask(
    client: ApiClient, model: str, conversation: Conversation, **fields: object
) -> StreamedAnswer:
    body = {
        "model": model,
        **conversation.prompt(),
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": conversation.salt,
        **fields,
    }
    return client.stream(conversation.path, body)


def can_chat(client: ApiClient, model: str) -> bool:
    """Whether the model has a chat template.

    Raises:
        RequestFailed: the server does not answer, or refuses for another reason.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    try:
        client.stream(CHAT, {**body, "prefix_cache": False})
    except RequestFailed as error:
        if error.kind == f"400 {NO_CHAT_TEMPLATE}":
            return False
        raise
    return True


def check_has_cache(client: ApiClient, model: str, text: SampleText, chat: bool) -> None:
    """Send one prompt again and again: another rank, without a copy, may have taken it in between.

    Raises:
        DeepInferError: it never came from a cache.
    """
    probe = Conversation(f"check-{secrets.token_hex(8)}", chat)
    probe.messages.append({"role": "user", "content": text.words(PROBE_TOKENS)})
    for _ in range(MOST_PROBES):
        answer = ask(client, model, probe, max_tokens=1)
        if answer.cached_tokens:
            return
    raise DeepInferError(
        f"The server at {client.url} has no prefix cache: of a prompt of {answer.prompt_tokens} tokens, "
        f"sent {MOST_PROBES} times, it took nothing from one. Start it with --hicache-size-gb above 0.",
        EXIT_NOT_CHECKED,
    )


def run_turns(client: ApiClient, model: str, workload: Workload) -> Iterator[Turn]:
    """All conversations, turn by turn in turn, so that each goes on after others came between.

    Raises:
        DeepInferError: the server fails, has no cache, or uses it when told not to.
    """
    chat = can_chat(client, model)
    text = SampleText.calibrated(Random(workload.seed), client, model, chat=chat)
    check_has_cache(client, model, text, chat)
    run = secrets.token_hex(8)
    talks = [Conversation(f"check-{run}-{n}", chat) for n in range(workload.conversations)]
    for turn in range(workload.turns):
        length = workload.prompt_tokens if turn == 0 else workload.turn_tokens
        for index, talk in enumerate(talks):
            talk.messages.append({"role": "user", "content": text.words(length)})
            # Whoever comes second finds a warmer machine: take turns.
            order = (False, True) if (turn + index) % 2 == 0 else (True, False)
            answers = {
                with_cache: ask(
                    client, model, talk, prefix_cache=with_cache, max_tokens=workload.max_tokens
                )
                for with_cache in order
            }
            off, on = answers[False], answers[True]
            if off.cached_tokens:
                raise DeepInferError(
                    f'{client.url} took {off.cached_tokens} tokens of a request with "prefix_cache": '
                    "false from its cache, so there is nothing to compare with.",
                    EXIT_NOT_CHECKED,
                )
            yield _compare(index, turn, off, on)
            talk.messages.append({"role": "assistant", "content": off.text})


def _compare(conversation: int, turn: int, off: StreamedAnswer, on: StreamedAnswer) -> Turn:
    return Turn(
        conversation=conversation + 1,
        turn=turn + 1,
        prompt_tokens=off.prompt_tokens,
        cached_tokens=on.cached_tokens or 0,
        ttft_off_seconds=off.first_token_seconds,
        ttft_on_seconds=on.first_token_seconds,
        speedup=off.first_token_seconds / max(on.first_token_seconds, 1e-9),
        equal=off.result() == on.result(),
        difference=difference(off, on),
    )


def difference(off: StreamedAnswer, on: StreamedAnswer) -> str:
    if off.text == on.text:
        if off.result() == on.result():
            return ""
        return (
            f"the same text, but {off.finish_reason} after {off.completion_tokens} tokens without "
            f"the cache and {on.finish_reason} after {on.completion_tokens} with it"
        )
    pairs = zip(off.text, on.text, strict=False)
    shortest = min(len(off.text), len(on.text))
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), shortest)
    rest = slice(at, at + SHOWN_CHARACTERS)
    return (
        f"from character {at} on, without the cache {off.text[rest]!r}, with it {on.text[rest]!r}"
    )


def _show_turns(turns: Iterator[Turn], console: Console) -> list[Turn]:
    table = plain_table()
    for header in (
        "conversation", "turn", "prompt tokens", "cached", "TTFT off", "TTFT on", "off / on"
    ):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("texts", no_wrap=True)
    done = []
    with Live(table, console=console, auto_refresh=False, transient=True) as live:
        for turn in turns:
            done.append(turn)
            _add_row(table, turn)
            live.refresh()
    console.print(table)
    return done


def _add_row(table: Table, turn: Turn) -> None:
    table.add_row(
        str(turn.conversation),
        str(turn.turn),
        number(turn.prompt_tokens),
        number(turn.cached_tokens),
        duration(turn.ttft_off_seconds),
        duration(turn.ttft_on_seconds),
        f"{turn.speedup:.1f}",
        "[green]equal[/]" if turn.equal else "[bold red]DIFFERENT[/]",
    )


def _show_verdict(report: Report, console: Console) -> None:
    turns = report.turns
    for turn in turns:
        if not turn.equal:
            where = f"conversation {turn.conversation}, turn {turn.turn}"
            console.print(f"[red]{where}:[/] {escape(turn.difference)}", soft_wrap=True)
    hits = [turn.speedup for turn in turns if turn.cached_tokens]
    equal = sum(turn.equal for turn in turns)
    colour = "green" if report.equal else "bold red"
    console.print(
        f"[{colour}]{equal} of {len(turns)} answers equal.[/] {report.hit_share:.0%} of the prompt "
        f"tokens came from the cache; TTFT without it is {statistics.median(hits):.1f} times that of "
        "a hit (median).",
        soft_wrap=True,
    )


Count = Annotated[int, Parameter(validator=Number(gte=1))]


def prefix_cache(
    *,
    url: str = "http://127.0.0.1:8888",
    turns: Count = 4,
    conversations: Count = 2,
    prompt_tokens: Count = 1024,
    turn_tokens: Count = 128,
    max_tokens: Count = 32,
    seed: int = 0,
    api_key: str | None = None,
    json: Annotated[bool, Parameter(negative="", help="Print JSON, no table.")] = False,
) -> None:
    """Compare a live server's answers with its prefix cache and without.

    Conversations grow turn by turn. Each turn is sent twice, greedy and streamed: once with
    "prefix_cache": false and once with the cache, in changing order. Exit code 0: all answers are equal;
    1: some differ; 2: the server cannot be reached or has no prefix cache.

    A model without a chat template gets plain prompts that grow.

    Equal answers are promised in float32; in bfloat16 a near-tie between two tokens may flip.

    Parameters
    ----------
    url
        Of the server.
    turns
        Turns of a conversation; from the second on, the cache can help.
    conversations
        How many run in turn.
    prompt_tokens
        Length of the first message, about.
    turn_tokens
        Length of each further message, about.
    max_tokens
        Length of the answers.
    seed
        Of the messages. What is cached is this run's own in any case.
    api_key
        Where the server wants one.
    """
    workload = Workload(turns, conversations, prompt_tokens, turn_tokens, max_tokens, seed)
    console = table_console()
    try:
        with ApiClient(url, api_key) as client:
            model = client.model().id
            found = run_turns(client, model, workload)
            done = list(found) if json else _show_turns(found, console)
    except RequestFailed as error:
        raise DeepInferError(str(error), EXIT_NOT_CHECKED) from error
    report = _report(client.url, model, done)
    if json:
        print_json(console, msgspec.json.encode(report))
    else:
        _show_verdict(report, console)
    sys.exit(EXIT_EQUAL if report.equal else EXIT_DIFFERENT)


def _report(url: str, model: str, turns: list[Turn]) -> Report:
    cached = sum(turn.cached_tokens for turn in turns)
    if not cached:
        raise DeepInferError(
            f"No turn took anything from the cache of {url}: give more --turns and --prompt-tokens, "
            "or look at `deepinfer inspect cache` for the reasons of its misses.",
            EXIT_NOT_CHECKED,
        )
    share = cached / max(sum(turn.prompt_tokens for turn in turns), 1)
    return Report(url, model, all(turn.equal for turn in turns), share, turns)
