"""One instance from its checks to its last file: what `deepinfer serve` does after parsing."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from typing import Final

import zmq
from rich.console import Console

from daemon.configuration.config import InstanceConfig
from daemon.inspection.control_server import ControlServer
from daemon.instance.host_pools import HostPools, check_pools
from daemon.instance.instance import Instance
from daemon.instance.key_ring import KeyRing
from daemon.instance.model_check import check_model
from daemon.instance.preflight import (
    check_devices,
    check_thread_limit,
    find_model,
    raise_descriptor_limit,
)
from daemon.instance.role_settings import child_specs, make_plan
from daemon.supervision.child_output import ChildOutput
from daemon.supervision.supervisor import Supervisor
from daemon.system.accelerator import detect_accelerator
from daemon.system.listen import open_listening_socket, open_port_warning
from daemon.system.run_directory import LOG_FILE, RunDirectory, choose_run_directory
from daemon.system.sd_notify import ServiceManager
from daemon.system.standard_output import StandardOutput
from daemon.system.stop_signals import StopSignals
from frontend.tokenizer.chat_template_files import read_chat_templates
from transport.sockets import Endpoints

FETCH_SECONDS: Final = 2400.0
"""How long the service manager is asked to wait for the default model."""

log = logging.getLogger(__name__)


def run_instance(config: InstanceConfig, signals: StopSignals, output: StandardOutput) -> None:
    """Check, lock, listen, run, clean up: each step undoes itself when a later one fails.

    Raises:
        DeepInferError: the instance could not start, or did not end cleanly.
    """
    accelerator = config.accelerator or detect_accelerator()
    run_path = choose_run_directory(config.instance, config.run_dir)
    check_devices(config, accelerator)
    keys = KeyRing(config.api_keys_file, config.admin_keys_file)
    check_pools(config)
    raise_descriptor_limit(config)
    check_thread_limit(config)
    directory = RunDirectory.lock(run_path, config.instance)
    bounded = output.bounded(run_path / LOG_FILE, round(config.log_mb * 1e6))
    with contextlib.closing(directory), bounded:
        # Before the model: an occupied port should not cost a download first.
        with open_listening_socket(config.host, config.port) as listener:
            warning = open_port_warning(config.host, config.api_keys_file is not None)
            if warning is not None:
                log.warning("%s", warning)
            # Fetching the default model takes minutes on a slow network.
            with signals.interrupting():
                model_dir = find_model(config.model, _tell_progress)
            check_model(config, accelerator, model_dir)
            plan = make_plan(config, model_dir, run_path, os.getpid())
            log.info("serving %s from %s on %s", plan.model_name, model_dir, plan.accelerator)
            pools = HostPools(config.instance, config.dp if plan.hicache_bytes else 0)
            specs = child_specs(plan, listener.fileno(), pools.descriptors)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            server = ControlServer(context, Endpoints(str(run_path)), plan.config_hash)
            try:
                gc.freeze()
                port: int = listener.getsockname()[1]

                def on_ready(url: str) -> None:
                    # From here on there may be nobody who sees why it ends, but for its log.
                    directory.keep_log = True
                    announce(plan.model_name, url, bool(read_chat_templates(model_dir)), warning)

                with ChildOutput(output.write_log) as printed:
                    supervisor = Supervisor(specs, directory.record_children, printed)
                    Instance(plan, supervisor, server, port, keys, on_ready).run(signals)
            finally:
                server.close()
                context.term()
                pools.close()
        log.info("stopped; nothing is left")
        directory.keep_log = False


def _tell_progress(line: str) -> None:
    log.info("%s", line)
    service = ServiceManager()
    service.status(line)
    service.extend_timeout(FETCH_SECONDS)
    service.close()


def announce(model: str, url: str, can_chat: bool, warning: str | None = None) -> None:
    if not sys.stdout.isatty() and os.environ.get("DEEPINFER_QUIET_START"):
        return
    console = Console(soft_wrap=True, highlight=False)
    if can_chat:
        path = "/v1/chat/completions"
        prompt = '"messages": [{"role": "user", "content": "Say hello."}]'
    else:
        path, prompt = "/v1/completions", '"prompt": "Hello", "max_tokens": 16'
    body = f'{{"model": "{model}", {prompt}}}'
    console.print(f"\n[bold green]{model} is ready at {url}[/]  (Ctrl-C stops it)\n")
    if warning is not None:
        console.print(f"{warning}\n", style="yellow", markup=False)
    console.print(
        f"curl {url}{path} -H 'Content-Type: application/json' -d '{body}'\n",
        markup=False,
    )
