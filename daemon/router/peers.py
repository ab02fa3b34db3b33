"""Who is there: frontends, tokenizers and ranks with their loads, and who may still come."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import msgspec

from daemon.router.settings import RouterSettings
from daemon.router.tokenizer_loads import TokenizerLoads
from transport.ids import DpRank, ProcessName, process_name
from transport.messages.generate import ModelInfo
from transport.messages.to_router import WorkerReady

MAX_FAILED_STARTS: Final = 3
"""Once more processes of a name than this were lost in a row before they served, the next is waited for
only briefly."""

Role = Literal["tokenizer", "worker"]


class Peers:
    """Owned by the router's core, which keeps the loads."""

    def __init__(self, settings: RouterSettings) -> None:
        self.frontends: set[ProcessName] = set()
        self.tokenizers = TokenizerLoads()
        self.loads: dict[DpRank, int] = {}
        """Open choices at each rank that is ready."""
        self.names: dict[DpRank, ProcessName] = {}
        """The process of each rank that is ready."""
        self.ranks: dict[ProcessName, DpRank] = {}
        """The same the other way round."""
        self.model: ModelInfo | None = None
        """What the ranks that are ready serve together; with none left, what the last one served."""
        self._models: dict[DpRank, ModelInfo] = {}
        self._stage_seconds = settings.stage_seconds
        self._start_seconds = max(settings.start_seconds, settings.stage_seconds)
        self._expected: dict[Role, list[ProcessName]] = {
            "tokenizer": [process_name("tokenizer", i) for i in range(settings.tokenizers)],
            "worker": [process_name("worker", i) for i in range(settings.workers)],
        }
        self._given_up: set[ProcessName] = set()
        self._failed_starts: Counter[ProcessName] = Counter()

    def tokenizer_joined(self, name: ProcessName) -> None:
        """A tokenizer takes prompts from now on. It may say so twice."""
        self.tokenizers.joined(name)
        self._serves(name)

    def worker_ready(self, name: ProcessName, ready: WorkerReady) -> None:
        """A rank takes choices from now on. It may say so twice."""
        self.loads.setdefault(ready.rank, 0)
        self.names[ready.rank] = name
        self.ranks[name] = ready.rank
        self._models[ready.rank] = ready.model
        self._serves(name)
        self._combine_models()

    def rank_lost(self, rank: DpRank) -> bool:
        """A rank is gone. Whether that changes what is served."""
        del self.ranks[self.names.pop(rank)]
        del self.loads[rank], self._models[rank]
        before = self.model
        self._combine_models()
        return self.model != before

    def note_loss(self, name: ProcessName, comes_back: bool) -> None:
        self._failed_starts[name] += 1
        if not comes_back:
            self._given_up.add(name)

    def max_wait(self, role: Role) -> float:
        """How many seconds a request may wait while there is no such process. 0.0: none will come.

        One that is being started is waited for as long as an instance may take to start. If all
        that may come have died again and again without serving, only as long as for a stage."""
        coming = [name for name in self._expected[role] if name not in self._given_up]
        if not coming:
            return 0.0
        if all(self._failed_starts[name] > MAX_FAILED_STARTS for name in coming):
            return self._stage_seconds
        return self._start_seconds

    def _serves(self, name: ProcessName) -> None:
        self._given_up.discard(name)
        del self._failed_starts[name]

    def _combine_models(self) -> None:
        models = list(self._models.values())
        if models:
            pool = min(model.pool_tokens for model in models)
            self.model = msgspec.structs.replace(models[0], pool_tokens=pool)
