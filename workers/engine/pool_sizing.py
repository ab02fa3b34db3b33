"""How large an engine's pools become: as asked for, or what this machine's memory leaves for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from transport.wording import GIB
from workers.contract import Engine, EngineError, EngineInfo, ModelLoadError
from workers.engine.memory_plan import host_pool_bytes, pages_for, plan_pool
from workers.engine.trial_steps import heaviest_steps
from workers.hardware.device import free_memory
from workers.hardware.host_memory import available_host_memory
from workers.settings import EngineSettings

_log = logging.getLogger(__name__)


def size_pools(
    settings: EngineSettings,
    info: EngineInfo,
    device: torch.device,
    open_trial: Callable[[EngineInfo], Engine],
    report: Callable[[str], None],
) -> EngineInfo:
    """Return `info` with the engine's number of pages and the context length that they allow.

    Args:
        settings: say how much memory may be used.
        info: everything else about the engine; its model is on the device already.
        device: where the pools will be.
        open_trial: opens an engine with pools for a given `EngineInfo`, to measure what steps take.
        report: receives a line of text at each stage.

    Raises:
        ModelLoadError: the pools do not fit.
    """
    report("planning memory")
    layout = info.layout
    states = info.max_num_seqs * layout.state_bytes
    if settings.kv_cache_gb is not None:
        budget = int(settings.kv_cache_gb * 1e9)
    elif device.type == "cpu":
        pages = info.max_num_seqs * pages_for(info.max_model_len, layout.page_tokens)
        budget = host_pool_bytes(available_host_memory() - states, pages * layout.page_bytes)
    else:
        peak = _measure_peak(replace(info, num_pages=1), open_trial, device, settings)
        budget = int(free_memory(device) * settings.gpu_memory_utilization) - peak - states
    plan = plan_pool(
        max(0, budget),
        layout.page_bytes,
        layout.page_tokens,
        info.max_model_len,
        info.max_num_seqs,
    )
    info = replace(info, num_pages=plan.num_pages, max_model_len=plan.max_model_len)
    _check_fit(info, free_memory(device))
    report(f"KV cache of {info.num_pages} pages, {info.num_pages * layout.page_tokens} tokens")
    return info


@contextmanager
def allocating_pools(info: EngineInfo, device: torch.device) -> Iterator[None]:
    """Wrap the allocation of an engine's pools.

    Raises:
        ModelLoadError: there is not enough memory after all.
    """
    try:
        with torch.inference_mode():
            yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, (EngineError, ModelLoadError)):
            raise
        raise _too_large(info, free_memory(device)) from error


def _measure_peak(
    info: EngineInfo,
    open_trial: Callable[[EngineInfo], Engine],
    device: torch.device,
    settings: EngineSettings,
) -> int:
    """Bytes that the largest steps take on top of weights and pools. They run against a single page."""
    with allocating_pools(info, device):
        engine = open_trial(info)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    limit = settings.max_batched_tokens
    try:
        for plan in heaviest_steps(info, limit):
            engine.launch(plan).collect()
    except EngineError as error:
        raise ModelLoadError(
            f"A trial step of {limit} tokens failed; lower --max-batched-tokens or --max-model-len ({error})."
        ) from error
    finally:
        engine.close()
    peak = torch.cuda.max_memory_allocated(device) - before
    _log.info("The largest step takes %.2f GiB beside weights and KV cache.", peak / GIB)
    return peak


def _check_fit(info: EngineInfo, free: int) -> None:
    """A CPU allocation takes no memory until it is used, so too large a pool would fail under load."""
    if _pool_bytes(info) > free:
        raise _too_large(info, free)


def _pool_bytes(info: EngineInfo) -> int:
    layout = info.layout
    return info.num_pages * layout.page_bytes + info.max_num_seqs * layout.state_bytes


def _too_large(info: EngineInfo, free: int) -> ModelLoadError:
    states = info.max_num_seqs * info.layout.state_bytes
    place = "this machine" if info.device == "cpu" else info.device
    of_states = f" and the states of {info.max_num_seqs} sequences" if states else ""
    return ModelLoadError(
        f"The KV cache{of_states} would take {_pool_bytes(info) / GIB:.1f} GiB, but {place} has "
        f"{free / GIB:.1f} GiB free: lower --kv-cache-gb, --max-num-seqs or --max-model-len."
    )
