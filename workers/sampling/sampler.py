"""Chooses tokens: keeps each slot's sampling parameters and turns logits into token ids.

A step does only the work that some of its rows need; a batch of greedy rows is one argmax. The
order of processing is: penalties, logit bias, `min_tokens` ban, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from workers.contract import TokenLogprobs
from workers.sampling.logit_processing import (
    TokenCounts,
    apply_penalties,
    draw,
    filter_probabilities,
    random_words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from transport.messages.generate import SamplingParams
    from workers.attention.batch import StepUpload
    from workers.contract import PromptChunk

_GREEDY_TEMPERATURE: Final = 1e-5
_PARAMETERS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class _SlotSampling:
    params: SamplingParams
    seed: int
    prompt_len: int
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    banned: npt.NDArray[np.int32]
    """Tokens that may not come before `min_tokens` tokens were generated."""
    counts_chunks: bool
    """Whether the tokens of its prompt chunks still have to be counted."""

    @property
    def random(self) -> bool:
        return self.params.temperature > _GREEDY_TEMPERATURE and self.params.top_k != 1

    @property
    def ranked(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1

    @property
    def penalised(self) -> bool:
        p = self.params
        return bool(p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty)


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of one step on the device, with logprobs where requested."""

    tokens: Tensor
    """int64 [R]."""
    logprob_rows: list[int]
    logprob_counts: list[int]
    """k for each of `logprob_rows`."""
    chosen: Tensor | None = None
    """float32 [rows with logprobs]."""
    top_ids: Tensor | None = None
    """int64 [rows with logprobs, largest k]."""
    top_logprobs: Tensor | None = None

    def to_host(self, tokens: Tensor) -> SampledTokens:
        """Copy the tokens to the host. They are complete once the work queued so far is done.

        `tokens` is page-locked memory for the token ids, with room for as many as there are.
        """

        def fetch(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to("cpu", non_blocking=True)

        return replace(
            self,
            tokens=tokens[: len(self.tokens)].copy_(self.tokens, non_blocking=True),
            chosen=fetch(self.chosen),
            top_ids=fetch(self.top_ids),
            top_logprobs=fetch(self.top_logprobs),
        )

    def host_logprobs(self) -> dict[int, TokenLogprobs]:
        """Logprobs by row. The tensors must be on the host."""
        if self.chosen is None or self.top_ids is None or self.top_logprobs is None:
            return {}
        ids = self.top_ids.numpy().astype(np.int32)
        values = self.top_logprobs.numpy()
        chosen = self.chosen.tolist()
        return {
            row: TokenLogprobs(chosen[i], ids[i, :k], values[i, :k])
            for i, (row, k) in enumerate(zip(self.logprob_rows, self.logprob_counts, strict=True))
        }


@dataclass(frozen=True)
class _CountedTokens:
    """Prompt tokens that a slot's penalties must know of: int32 views of the step's upload."""

    slot: int
    begins: bool
    prompt: Tensor
    generated: Tensor


@dataclass(frozen=True)
class SamplingInputs:
    """The host's part of one step's sampling. Tensors are int32 views of the step's upload."""

    states: list[_SlotSampling]
    """One for each sampled row."""
    work: _StepWork
    slots: Tensor
    """[R]."""
    penalised: Tensor
    random: Tensor
    words: Tensor
    with_logprobs: Tensor
    adjusted_rows: Tensor
    adjusted_ids: Tensor
    adjustments: Tensor
    begun: Tensor
    """Slots that begin."""
    parameters: Tensor
    """Their rows of the parameter table, the bits of a float32 each."""
    counted: list[_CountedTokens]

    @property
    def only_greedy(self) -> bool:
        """Whether the likeliest tokens are all that the step needs."""
        work = self.work
        wanted = (work.random, work.penalised, work.adjusted_rows, work.with_logprobs, self.begun)
        return not self.counted and not any(len(rows) for rows in wanted)


class Sampler:
    """Sampling state of all slots. Not thread-safe."""

    def __init__(
        self, slots: int, vocab_size: int, eos_token_ids: Iterable[int], device: torch.device
    ) -> None:
        self._num_slots = slots
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._slots: list[_SlotSampling | None] = [None] * slots
        self._parameters = torch.zeros(slots, len(_PARAMETERS), device=device)
        self._counts: TokenCounts | None = None

    def prepare(
        self,
        chunks: Sequence[PromptChunk],
        slots: Sequence[int],
        positions: Sequence[int],
        upload: StepUpload,
    ) -> SamplingInputs:
        """Take over the parameters of slots that begin, and work out what the step's rows need.

        Args:
            chunks: what a prompt step computes, or those that arrive in a decode step.
            slots: the slot of each sampled row.
            positions: the position in its sequence of the token that each sampled row yields.
            upload: receives what the device must know.
        """
        beginning = [c for c in chunks if c.begin]
        for chunk in beginning:
            self._slots[chunk.slot] = self._slot_sampling(chunk)
        states = [self._slot(slot) for slot in slots]
        work = _StepWork.plan(states, positions)
        table = np.array(
            [[getattr(c.sampling, name) for name in _PARAMETERS] for c in beginning], np.float32
        )
        return SamplingInputs(
            states=states,
            work=work,
            slots=upload.put(np.array(slots, np.int32)),
            penalised=upload.put(work.penalised),
            random=upload.put(work.random),
            words=upload.put(work.words.view(np.int32)),
            with_logprobs=upload.put(work.with_logprobs),
            adjusted_rows=upload.put(work.adjusted_rows),
            adjusted_ids=upload.put(work.adjusted_ids),
            adjustments=upload.put(work.adjustments.view(np.int32)),
            begun=upload.put(np.array([c.slot for c in beginning], np.int32)),
            parameters=upload.put(table.view(np.int32).ravel()),
            counted=[
                self._counted(chunk, upload) for chunk in chunks if self._slot(chunk.slot).penalised
            ],
        )

    def _slot_sampling(self, chunk: PromptChunk) -> _SlotSampling:
        params = chunk.sampling
        # An id beyond the vocabulary would be an illegal address on a GPU.
        bias = [(i, v) for i, v in params.logit_bias if 0 <= i < self._vocab_size]
        banned = sorted({*self._eos, *params.stop_token_ids}) if params.min_tokens else []
        return _SlotSampling(
            params=params,
            seed=chunk.seed,
            prompt_len=chunk.prompt_len,
            bias_ids=np.array([i for i, _ in bias], np.int32),
            bias_values=np.array([v for _, v in bias], np.float32),
            banned=np.array([i for i in banned if 0 <= i < self._vocab_size], np.int32),
            counts_chunks=chunk.history is None,
        )

    def _counted(self, chunk: PromptChunk, upload: StepUpload) -> _CountedTokens:
        if chunk.begin and chunk.history is not None:
            tokens, prompt = chunk.history, chunk.prompt_len
        elif self._slot(chunk.slot).counts_chunks:
            tokens, prompt = chunk.tokens, max(0, chunk.prompt_len - chunk.start)
        else:
            tokens, prompt = chunk.tokens[:0], 0
        ids = np.asarray(tokens, np.int32)
        return _CountedTokens(
            chunk.slot, chunk.begin, upload.put(ids[:prompt]), upload.put(ids[prompt:])
        )

    def sample(self, inputs: SamplingInputs, logits: Tensor | None) -> SampledTokens:
        """Choose one token per row on the device. Call it once the upload is sent.

        `logits` is [R, vocab_size] of any float type, or None if the step samples nothing.
        """
        if len(inputs.begun):
            values = inputs.parameters.view(torch.float32).view(-1, len(_PARAMETERS))
            self._parameters[inputs.begun.long()] = values
        for counted in inputs.counted:
            self._count(counted)
        slots = inputs.slots.long()
        if logits is None or not len(slots):
            return SampledTokens(slots[:0], [], [])
        work = inputs.work
        raw = logits if work.only_random else logits.float()
        processed = raw
        if len(work.penalised):
            processed = self._penalise(raw, inputs.penalised.long(), slots)
        if len(work.adjusted_rows):
            processed = processed.index_put(
                (inputs.adjusted_rows.long(), inputs.adjusted_ids.long()),
                inputs.adjustments.view(torch.float32),
                accumulate=True,
            )
        tokens = processed.argmax(-1)
        if len(work.random):
            index = inputs.random.long()
            tokens[index] = self._draw(processed, inputs.random, slots[index], inputs.words, work)
        if len(work.penalised):
            index = inputs.penalised.long()
            self._token_counts().add_sampled(slots[index], tokens[index])
        return _with_logprobs(raw, tokens, inputs.with_logprobs.long(), work, inputs.states)

    def _count(self, counted: _CountedTokens) -> None:
        counts = self._token_counts()
        if counted.begins:
            counts.reset(counted.slot)
        if len(counted.prompt) or len(counted.generated):
            counts.add(counted.slot, counted.prompt.long(), counted.generated.long())

    def _penalise(self, logits: Tensor, rows: Tensor, slot_index: Tensor) -> Tensor:
        slots = slot_index[rows]
        counts = self._token_counts()
        repetition, frequency, presence = self._parameters[slots, 4:].unbind(1)
        changed = apply_penalties(
            logits[rows],
            counts.generated[slots],
            counts.seen[slots],
            repetition,
            frequency,
            presence,
        )
        return logits.index_copy(0, rows, changed)

    def _draw(
        self, logits: Tensor, rows: Tensor, slots: Tensor, words: Tensor, work: _StepWork
    ) -> Tensor:
        parameters = self._parameters[slots, :4]
        if logits.is_cuda:
            # Imported here: a CPU worker may have no Triton.
            from workers.sampling.triton.draw import draw_tokens  # noqa: PLC0415

            return draw_tokens(logits, rows, parameters, words)
        temperature, top_k, top_p, min_p = parameters.unbind(1)
        probabilities = (logits[rows.long()].float() / temperature[:, None]).softmax(-1)
        if work.filtered:
            probabilities = filter_probabilities(
                probabilities, top_k.long(), top_p, min_p, work.ranked
            )
        return draw(probabilities, words)

    def _slot(self, slot: int) -> _SlotSampling:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} was used before its first chunk"
        return state

    def _token_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self._num_slots, self._vocab_size, self._device)
        return self._counts


@dataclass(frozen=True)
class _StepWork:
    """Which rows of a step need what. All arrays index rows of the step."""

    penalised: npt.NDArray[np.int32]
    random: npt.NDArray[np.int32]
    words: npt.NDArray[np.uint32]
    """One uniform word for each of `random`."""
    adjusted_rows: npt.NDArray[np.int32]
    adjusted_ids: npt.NDArray[np.int32]
    adjustments: npt.NDArray[np.float32]
    """What is added to the logit (row, id)."""
    with_logprobs: npt.NDArray[np.int32]
    filtered: bool
    ranked: bool

    @property
    def only_random(self) -> bool:
        """Whether nothing changes the logits or asks for their logarithms."""
        return not any(map(len, (self.penalised, self.adjusted_rows, self.with_logprobs)))

    @classmethod
    def plan(cls, states: list[_SlotSampling], positions: Sequence[int]) -> _StepWork:
        rows: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
        ids = [np.empty(0, np.int32)]
        values = [np.empty(0, np.float32)]
        for row, (state, position) in enumerate(zip(states, positions, strict=True)):
            for extra, amounts in _adjustments(state, position):
                rows.append(np.full(len(extra), row, np.int32))
                ids.append(extra)
                values.append(amounts)
        random = [i for i, s in enumerate(states) if s.random]
        seeds = np.array([states[i].seed & 0xFFFFFFFFFFFFFFFF for i in random], np.uint64)
        places = np.array([positions[i] for i in random], np.int64)
        return cls(
            penalised=np.array([i for i, s in enumerate(states) if s.penalised], np.int32),
            random=np.array(random, np.int32),
            words=random_words(seeds, places),
            adjusted_rows=np.concatenate(rows),
            adjusted_ids=np.concatenate(ids),
            adjustments=np.concatenate(values),
            with_logprobs=np.array(
                [i for i, s in enumerate(states) if s.params.logprobs >= 0], np.int32
            ),
            filtered=any(states[i].ranked or states[i].params.min_p > 0 for i in random),
            ranked=any(states[i].ranked for i in random),
        )


def _adjustments(
    state: _SlotSampling, position: int
) -> Iterable[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    if len(state.bias_ids):
        yield state.bias_ids, state.bias_values
    if len(state.banned) and position - state.prompt_len < state.params.min_tokens:
        yield state.banned, np.full(len(state.banned), -np.inf, np.float32)


def _with_logprobs(
    raw: Tensor, tokens: Tensor, rows: Tensor, work: _StepWork, states: list[_SlotSampling]
) -> SampledTokens:
    wanted = [int(i) for i in work.with_logprobs]
    counts = [states[i].params.logprobs for i in wanted]
    if not wanted:
        return SampledTokens(tokens, [], [])
    logprobs = raw[rows].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[rows][:, None])[:, 0]
    top = logprobs.topk(min(max(counts), raw.shape[1]), dim=-1)
    return SampledTokens(tokens, wanted, counts, chosen, top.indices, top.values)
