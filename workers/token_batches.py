"""What a step yielded, as messages to the frontends."""

from __future__ import annotations

from collections.abc import Iterator

from transport.framing import token_frame
from transport.ids import ProcessName
from transport.logprobs import LogprobWriter
from transport.messages.generate import TokenBatch
from workers.scheduling.sequence import Sequence
from workers.scheduling.step import StepOutput, TokenRow


def token_batches(output: StepOutput) -> Iterator[tuple[TokenBatch, list[memoryview]]]:
    frontends: dict[ProcessName, tuple[list[TokenRow], list[Sequence]]] = {}
    for row in output.rows:
        frontend = row.sequence.frontend
        if frontend not in frontends:
            frontends[frontend] = ([], [])
        frontends[frontend][0].append(row)
    for sequence in output.step.started:
        frontends.setdefault(sequence.frontend, ([], []))[1].append(sequence)
    for frontend, (rows, started) in frontends.items():
        yield _token_batch(frontend, output.step.plan.step, rows, started)


def _token_batch(
    frontend: ProcessName, step: int, rows: list[TokenRow], started: list[Sequence]
) -> tuple[TokenBatch, list[memoryview]]:
    wanted = [row.sequence.sampling.logprobs for row in rows]
    with_logprobs = any(count >= 0 for count in wanted)
    batch = TokenBatch(
        frontend=frontend,
        step=step,
        request_ids=[row.sequence.key[0] for row in rows],
        indexes=[row.sequence.key[1] for row in rows],
        counts=[1] * len(rows),
        finish=[row.finish for row in rows],
        logprobs=wanted if with_logprobs else [],
        started=[(s.key[0], s.key[1], s.prefix.cached_tokens, s.prompt_len) for s in started],
    )
    frames = [token_frame([row.token for row in rows])]
    if with_logprobs:
        frames.append(_logprob_frame(rows))
    return batch, frames


def _logprob_frame(rows: list[TokenRow]) -> memoryview:
    writer = LogprobWriter()
    for row in rows:
        top = row.sequence.sampling.logprobs
        if top < 0:
            continue
        if row.logprobs is None:
            raise ValueError(f"the engine returned no logprobs for {row.sequence.key}")
        writer.write(row.logprobs, top)
    return writer.frame()
