"""Where option values come from: flag, then environment, then TOML file, then default.

cyclopts parses all of them; this module tells it which file to read and keeps a record of each
value's origin for `deepinfer config show`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from cyclopts import App, ArgumentCollection
from cyclopts.argument import Token
from cyclopts.config import Env, Toml
from cyclopts.exceptions import CycloptsError

from daemon.configuration.config import InstanceConfig

ENVIRONMENT_PREFIX: Final = "DEEPINFER_"
MODEL_DIR_VARIABLE: Final = "DEEPINFER_HF_MODEL_DIR"
OTHER_VARIABLES: Final = (MODEL_DIR_VARIABLE, "DEEPINFER_CACHE_DIR", "DEEPINFER_QUIET_START")
"""Those that belong to no option by their name."""
_SERVICE_PORT: Final = re.compile(r"DEEPINFER_(\w+_)?PORT")
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://")
_SERVICE_VARIABLE: Final = re.compile(
    r"DEEPINFER_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
SYSTEM_CONFIG_DIR: Final = Path("/etc/deepinfer")


def _first_token(arguments: ArgumentCollection, name: str) -> str | None:
    argument = arguments.get(name, None)
    if argument is None or not argument.tokens:
        return None
    return str(argument.tokens[0].value)


class Environment(Env):
    """Variables with an option's name, without the one that Kubernetes sets to an address."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        super().__call__(app, commands, arguments)
        for argument in arguments:
            kept = [
                t for t in argument.tokens if not _is_service_variable(t.keyword or "", t.value)
            ]
            argument.tokens[:] = kept


class ModelDirVariable:
    """The other variable that names the model; DEEPINFER_MODEL goes before it."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        argument, value = arguments.get("--model", None), os.environ.get(MODEL_DIR_VARIABLE)
        if argument is not None and not argument.tokens and value is not None:
            argument.append(Token(keyword=MODEL_DIR_VARIABLE, value=value, source="env"))


class _OptionsFile(Toml):
    """TOML in which --hf-overrides may be a table instead of a text with JSON."""

    def _load_config(self, path: Path) -> dict[str, object]:
        try:
            # Editors of Windows begin a file with a byte order mark, which TOML does not know.
            options: dict[str, object] = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CycloptsError(
                msg=f"The configuration file {path} is no valid TOML: {error}."
            ) from error
        for name in ("hf_overrides", "hf-overrides"):
            if isinstance(options.get(name), dict):
                options[name] = msgspec.json.encode(options[name]).decode()
        return options


class InstanceFile:
    """Reads the TOML file named by --config, else that of the instance if there is one.

    Runs after the flags and the environment, so both may name the file or the instance. Commands
    that take only some options ignore the others; `serve` refuses unknown keys.
    """

    def __init__(self, system_dir: Path = SYSTEM_CONFIG_DIR) -> None:
        self._system_dir = system_dir

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        named = _first_token(arguments, "--config")
        if arguments.get("--instance", None) is None:
            return
        instance = _first_token(arguments, "--instance") or "default"
        path = Path(named) if named else self._system_dir / f"{instance}.toml"
        if named is not None:
            _check_readable(path)
        elif "/" in instance or not path.is_file():
            return
        takes_all = arguments.get("--model", None) is not None
        _OptionsFile(path, use_commands_as_keys=False, allow_unknown=not takes_all)(
            app, commands, arguments
        )


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise CycloptsError(
            msg=f"The configuration file {path} cannot be read ({error.strerror}): "
            "name another one with --config."
        ) from error


class Provenance:
    """Remembers where the values of the last parsed command came from."""

    def __init__(self) -> None:
        self._origins: dict[str, str] = {}

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        self._origins = {
            argument.field_info.name: _origin(argument.tokens[0].source, argument.tokens[0].keyword)
            for argument in arguments
            if argument.tokens
        }

    def origin(self, field_name: str) -> str:
        """`flag --port`, `environment DEEPINFER_PORT`, `file /etc/…` or `default`."""
        return self._origins.get(field_name, "default")


def _origin(source: str, keyword: str | None) -> str:
    if source == "cli":
        return f"flag {keyword}"
    if source == "env":
        return f"environment {keyword}"
    return f"file {source}"


provenance: Final = Provenance()
"""Where the values of the command that this process runs came from."""

SOURCES: Final = (
    Environment(ENVIRONMENT_PREFIX, command=False), ModelDirVariable(), InstanceFile(), provenance,
)  # fmt: skip


def ignored_variables(variables: Mapping[str, str]) -> list[str]:
    """One sentence for each environment variable that looks like an option but is none, for a slip
    would otherwise go unnoticed; and one for all that Kubernetes has set."""
    prefix = ENVIRONMENT_PREFIX
    known = [field.name.upper() for field in dataclasses.fields(InstanceConfig)]
    known += [name.removeprefix(prefix) for name in OTHER_VARIABLES]
    of_services = [
        name for name in sorted(variables) if _is_service_variable(name, variables[name])
    ]
    sentences = []
    for name in sorted(variables.keys() - of_services):
        option = name.removeprefix(prefix)
        if name.startswith(prefix) and option not in known:
            near = difflib.get_close_matches(option, known, 1)
            hint = f": did you mean {prefix}{near[0]}?" if near else "."
            sentences.append(f"The environment variable {name} is ignored, it is no option{hint}")
    if of_services:
        sentences.append(
            f"Ignored are variables that Kubernetes sets for a Service ({', '.join(of_services)}): "
            "give that Service a name that does not begin with deepinfer, or set enableServiceLinks: false "
            "for the pod."
        )
    return sentences


def _is_service_variable(name: str, value: str) -> bool:
    """Whether Kubernetes has set it, in every pod beside a Service with a name like deepinfer."""
    return bool(_SERVICE_VARIABLE.fullmatch(name)) or bool(
        _SERVICE_PORT.fullmatch(name) and _SERVICE_ADDRESS.match(value)
    )
