"""Turns the configuration of the instance into the settings of each of its processes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from daemon.configuration.config import InstanceConfig, read_overrides
from daemon.instance.host_pools import STATE_SLOTS, pool_bytes
from daemon.instance.sampling_defaults import read_sampling_defaults
from daemon.router.settings import RouterSettings
from daemon.supervision.child_process import ChildSpec
from daemon.system.accelerator import detect_accelerator, nvidia_devices, usable_cores
from frontend.settings import FrontendSettings, SamplingDefaults, TokenizerSettings
from transport.child import ProcessSettings
from transport.frame_limits import prompt_frame_bytes
from transport.ids import ROUTER_NAME, DpRank, ProcessName, process_name
from transport.messages.base import Role
from workers.settings import Accelerator, EngineSettings, WorkerSettings

MODULES: Final[dict[Role, str]] = {
    "router": "daemon.router.run",
    "tokenizer": "frontend.tokenizer.run",
    "worker": "workers.run",
    "frontend": "frontend.run",
}


@dataclass(frozen=True)
class InstancePlan:
    """The configuration with everything found out that it left open."""

    config: InstanceConfig
    model_dir: Path
    model_name: str
    run_dir: Path
    accelerator: Accelerator
    devices: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of each rank; empty on a CPU."""
    daemon_pid: int
    hicache_bytes: int
    """For the pages of each rank's prefix cache; 0: none."""
    hicache_states: int
    sampling_defaults: SamplingDefaults

    @property
    def config_hash(self) -> str:
        text = msgspec.json.encode(
            (asdict(self.config), str(self.model_dir), self.accelerator), enc_hook=str
        )
        return hashlib.sha256(text).hexdigest()


def make_plan(config: InstanceConfig, model_dir: Path, run_dir: Path, pid: int) -> InstancePlan:
    """Find out what the configuration leaves open.

    Raises:
        ConfigurationError: the model's sampling defaults cannot be used.
    """
    accelerator = config.accelerator or detect_accelerator()
    if config.engine == "fake":
        accelerator = "cpu"
    devices = tuple(nvidia_devices()[: config.dp]) if accelerator == "nvidia" else ()
    return InstancePlan(
        config=config,
        model_dir=model_dir,
        model_name=config.served_model_name or model_dir.name,
        run_dir=run_dir,
        accelerator=accelerator,
        devices=devices,
        daemon_pid=pid,
        hicache_bytes=pool_bytes(config, accelerator),
        hicache_states=config.hicache_state_slots or STATE_SLOTS[accelerator],
        sampling_defaults=read_sampling_defaults(model_dir, config.sampling_defaults),
    )


def child_specs(plan: InstancePlan, listen_fd: int, pool_fds: Sequence[int]) -> list[ChildSpec]:
    """All children of the instance, in the order in which they are started. `pool_fds`: the segment
    of each rank's prefix cache; none where there is no cache."""
    config = plan.config
    return [
        _router(plan),
        *(_worker(plan, DpRank(rank), pool_fds[rank : rank + 1]) for rank in range(config.dp)),
        *(_tokenizer(plan, number) for number in range(config.tokenizers)),
        *(_frontend(plan, number, listen_fd) for number in range(config.frontends)),
    ]


def _process(plan: InstancePlan, name: ProcessName, role: Role) -> ProcessSettings:
    return ProcessSettings(
        name=name,
        role=role,
        instance=plan.config.instance,
        run_dir=str(plan.run_dir),
        parent_pid=plan.daemon_pid,
        config_hash=plan.config_hash,
        log_level=plan.config.log_level,
        max_frame=prompt_frame_bytes(_max_body_bytes(plan.config)),
        heartbeat_seconds=plan.config.heartbeat_seconds,
    )


def _max_body_bytes(config: InstanceConfig) -> int:
    return round(config.max_body_mb * 1_000_000)


LARGE_BLOCKS_APART: Final = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""For glibc: memory of large bodies goes back to the system as soon as it is free. (By default, the
threshold rises to 32 MB with the blocks that are freed, and what lies below it is kept.)"""


def _spec(
    process: ProcessSettings,
    settings: msgspec.Struct,
    environment: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> ChildSpec:
    return ChildSpec(
        name=process.name,
        role=process.role,
        module=MODULES[process.role],
        settings=msgspec.json.encode(settings),
        environment=environment or {},
        pass_fds=pass_fds,
    )


SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)


def _settings(kind: type[SettingsT], config: InstanceConfig, /, **found: object) -> SettingsT:
    """What was `found` out, and each option that has a field of its name in `kind`."""
    names = {field.name for field in msgspec.structs.fields(kind)}
    options = {name: value for name, value in vars(config).items() if name in names}
    return kind(**options | found)


def _router(plan: InstancePlan) -> ChildSpec:
    config = plan.config
    process = _process(plan, ROUTER_NAME, "router")
    settings = _settings(
        RouterSettings,
        config,
        process=process,
        workers=config.dp,
        max_waiting_bytes=round(config.max_waiting_mb * 1_000_000),
        retry_after_seconds=config.retry_after,
        stage_seconds=config.stage_timeout,
        start_seconds=config.start_timeout,
    )
    return _spec(process, settings)


def _worker(plan: InstancePlan, rank: DpRank, pool_fds: Sequence[int]) -> ChildSpec:
    config = plan.config
    on_gpu = plan.accelerator == "nvidia"
    threads = 1 if on_gpu else max(usable_cores() // config.dp, 1)
    process = _process(plan, process_name("worker", rank), "worker")
    engine = _settings(
        EngineSettings,
        config,
        kind=config.engine,
        fake_step_seconds=config.fake_step_ms / 1000,
        model_dir=str(plan.model_dir),
        accelerator=plan.accelerator,
        num_threads=threads,
        hf_overrides=read_overrides(config.hf_overrides),
        max_num_seqs=config.max_num_seqs or (256 if on_gpu else 32),
        max_batched_tokens=config.max_batched_tokens or (8192 if on_gpu else 512),
        keep_tokens=config.yoco_keep_tokens,
        stores_prefixes=bool(pool_fds),
    )
    settings = _settings(
        WorkerSettings,
        config,
        process=process,
        rank=rank,
        engine=engine,
        hicache_fd=pool_fds[0] if pool_fds else None,
        hicache_bytes=plan.hicache_bytes,
        hicache_states=plan.hicache_states,
    )
    # Threads that wait for each other must not spin: on a busy machine they would hold the very core
    # that the last one needs, and a step took ten times as long.
    environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = plan.devices[rank]
    return _spec(process, settings, environment, tuple(pool_fds))


def _tokenizer(plan: InstancePlan, number: int) -> ChildSpec:
    process = _process(plan, process_name("tokenizer", number), "tokenizer")
    return _spec(process, TokenizerSettings(process, str(plan.model_dir)))


def _frontend(plan: InstancePlan, number: int, listen_fd: int) -> ChildSpec:
    config = plan.config
    process = _process(plan, process_name("frontend", number), "frontend")
    settings = _settings(
        FrontendSettings,
        config,
        process=process,
        listen_fd=listen_fd,
        model_dir=str(plan.model_dir),
        model_name=plan.model_name,
        max_body_bytes=_max_body_bytes(config),
        body_buffer_bytes=round(config.body_buffer_mb * 1_000_000),
        max_header_bytes=config.max_header_kib << 10,
        stream_high_water_bytes=config.stream_high_water_kib << 10,
        retry_after_seconds=config.retry_after,
        drain_seconds=config.drain_timeout,
        sampling_defaults=plan.sampling_defaults,
    )
    return _spec(process, settings, dict(LARGE_BLOCKS_APART), (listen_fd,))
