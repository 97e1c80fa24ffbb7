"""``rollfeed serve engine``: a model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass, fields, replace
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollfeed.app import load_model
from rollfeed.base.cores import num_physical_cores
from rollfeed.cli import exit_codes
from rollfeed.cli.arguments import Parsers, add_address, add_command, add_numbers, add_server_key, server_key
from rollfeed.config import EngineSettings, Kernels, Precision, is_device
from rollfeed.config.api_key import ApiKey
from rollfeed.engine import DEFAULT_MODEL, resolve_checkpoint
from rollfeed.errors import ConfigError, EngineError, RollfeedError

if TYPE_CHECKING:
    from rollfeed.engine.local import EmbeddedEngine
    from rollfeed.weights.transports.delta import CheckpointStore

logger = logging.getLogger("rollfeed.serve")

_DEFAULT_PORT = 30000
_DEFAULT_CONTEXT_LENGTH = 2048
_EXIT_SECONDS = 1.4
"""After this a process that was told to end does so, whatever it is doing."""
_SPARE_SECONDS = 0.2
"""What several workers get beyond that before they are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The model that one process serves, and its address."""

    model: str
    host: str
    port: int
    """0 takes a free one."""
    threads: int
    num_slots: int
    context_length: int
    """0 takes the model's, up to 2048."""
    max_waiting: int
    device: str
    kernels: str
    precision: str
    key_env: str | None
    """Variable with the key that clients bear."""


def register(actions: Parsers) -> None:
    """Add the action to those of ``serve``."""
    engine = add_command(
        actions,
        "engine",
        run,
        help="serve the embedded engine, to clients of SGLang, OpenAI and Anthropic",
        description="Serve the embedded engine with SGLang's endpoints, OpenAI's and Anthropic's. Pictures of requests "
        "stay in a temporary folder, 1 GiB at most: what was not wanted for longest leaves.",
        epilog="example: rollfeed serve engine --model smollm2-135m-instruct --port 30000",
    )
    engine.add_argument(
        "--model", metavar="M", default=DEFAULT_MODEL, help=f"folder, .gguf file or hub name (default {DEFAULT_MODEL})"
    )
    add_address(engine, _DEFAULT_PORT, "first port")
    add_server_key(engine)
    add_numbers(
        engine,
        {
            "--workers": (1, "processes, on ports P, P+1, ..."),
            "--threads": (0, "CPU threads of each process (default: measured; several processes share the cores)"),
            "--num-slots": (32, "responses decoded at once"),
            "--context-length": (0, "most tokens of prompt and response (default 2048)"),
            "--max-waiting": (1024, "requests that may wait; more get 429"),
        },
    )
    defaults = EngineSettings()
    engine.add_argument("--device", metavar="D", default=defaults.device, help="cpu, or a GPU such as cuda:0")
    engine.add_argument(
        "--kernels",
        choices=[each.value for each in Kernels],
        default=defaults.kernels.value,
        help="what computes on the CPU (default: native ones where they can be compiled)",
    )
    engine.add_argument(
        "--precision",
        choices=[each.value for each in Precision],
        default=defaults.precision.value,
        help="default: exact, which is fp32 on a CPU and bf16 on a GPU",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; both end it within two seconds.

    Raises:
        ConfigError: If the model cannot be served with these settings, or the port is taken.
    """
    _check(arguments)
    server_key(arguments)
    name = Path(arguments.model).name.removesuffix(".gguf") or arguments.model
    # Converted or fetched here, once, before several processes look for it.
    model = str(resolve_checkpoint(arguments.model))
    options = ServeOptions(**{each.name: getattr(arguments, each.name) for each in fields(ServeOptions)})
    options = replace(options, model=model)
    if arguments.workers == 1:
        return serve_one(options, name=name)
    return serve_several(options, num_workers=arguments.workers, name=name)


def _check(arguments: argparse.Namespace) -> None:
    last_port = arguments.port + arguments.workers - 1
    checks = [
        (arguments.workers >= 1, f"--workers {arguments.workers}: must be at least 1"),
        (arguments.port >= 0 and last_port <= 65535, f"--port {arguments.port}: ports must be within 0 and 65535"),
        (arguments.port > 0 or arguments.workers == 1, "--port 0: several workers need a port to count from"),
        (arguments.max_waiting >= 0, f"--max-waiting {arguments.max_waiting}: must be at least 0"),
        (arguments.threads >= 0, f"--threads {arguments.threads}: must be at least 1, or 0 for all cores"),
        (is_device(arguments.device), f"--device {arguments.device}: must be cpu, or cuda:0 for the first GPU"),
        (arguments.context_length >= 0, f"--context-length {arguments.context_length}: must be at least 2"),
    ]
    for holds, message in checks:
        if not holds:
            raise ConfigError(message)


def serve_one(options: ServeOptions, *, name: str) -> int:
    """Serve in this process and return the exit code."""
    return asyncio.run(_serve(options, name))


async def _serve(options: ServeOptions, name: str) -> int:
    from rollfeed.weights.transports.delta import CheckpointStore

    # Deltas of weights make folders there, which the engine is then told to load.
    with (
        tempfile.TemporaryDirectory(prefix="rollfeed-weights-") as folder,
        closing(CheckpointStore(Path(folder))) as received,
    ):
        with _collecting_afterwards():
            engine, serving = _prepare(options, name, received)
        return await _serve_engine(engine, serving, name)


async def _serve_engine(engine: EmbeddedEngine, serving: AbstractAsyncContextManager[str], name: str) -> int:
    told = exit_codes.ToldToEnd()
    async with engine, serving as address:
        logger.info("serving %s at %s", name, address)
        try:
            await told.beside(engine.failed())
        except EngineError:
            _exit_later(exit_codes.FAILED)
            raise
        _exit_later(told.exit_code)
    return told.exit_code


@contextmanager
def _collecting_afterwards() -> Iterator[None]:
    """Collect no garbage while modules are imported, nor ever look at what they keep.

    Looking through all of it takes up to a second of the start, and later a quarter of one each time,
    in which no reply goes out.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _prepare(
    options: ServeOptions, name: str, received: CheckpointStore
) -> tuple[EmbeddedEngine, AbstractAsyncContextManager[str]]:
    """Return the engine and the server of it, neither of them entered."""
    try:
        from rollfeed.engine.local import create_local_engine
        from rollfeed.engine.server import ServedModel, Service, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the embedded engine needs {error.name}, which is not installed: pip install 'rollfeed[local]'"
        ) from None
    from rollfeed.model_files import read_config
    from rollfeed.prompts.pictures.picture_folder import SERVED_BYTES
    from rollfeed.weights.transports.delta import DeltaReceiver

    model = load_model(options.model)
    model.store.max_temporary_bytes = SERVED_BYTES
    config = read_config(model.checkpoint)
    engine = create_local_engine(
        checkpoint=model.checkpoint,
        tokenizer=model.tokenizer,
        context_length=options.context_length or _context_length(config),
        deterministic=False,
        pictures=model.pictures,
        **{name: getattr(options, name) for name in ("threads", "num_slots", "device", "kernels", "precision")},
    )
    served = ServedModel(
        model_path=options.model, name=name, created=int(time.time()), config=config, max_waiting=options.max_waiting
    )
    seeing = model.picture_input if engine.takes_pictures else None
    service = Service(engine, tokenizer=model.tokenizer, model=served, picture_input=seeing)
    routes = DeltaReceiver(received).routes()
    key = ApiKey.read(options.key_env, setting="--key-env").value
    return engine, serve(service, host=options.host, port=options.port, key=key, more_routes=routes)


def _exit_later(code: int) -> None:
    """See that the process ends in time, also when a step of the model takes longer."""
    timer = threading.Timer(_EXIT_SECONDS, lambda: os._exit(code))
    timer.daemon = True
    timer.start()


def _context_length(config: dict[str, Any]) -> int:
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    return min(limit, _DEFAULT_CONTEXT_LENGTH) if isinstance(limit, int) else _DEFAULT_CONTEXT_LENGTH


def serve_several(options: ServeOptions, *, num_workers: int, name: str) -> int:
    """Serve in processes of their own, on consecutive ports, until told to end or one of them has ended."""
    threads = options.threads or max(1, num_physical_cores() // num_workers)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(
            target=_worker, args=(replace(options, port=options.port + index, threads=threads), name), daemon=True
        )
        for index in range(num_workers)
    ]
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    received: list[signal.Signals] = []
    with reader, writer:
        signal.set_wakeup_fd(writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _frame: received.append(signal.Signals(got)))
        for worker in workers:
            worker.start()
        connection.wait([reader, *(worker.sentinel for worker in workers)])
        signal.set_wakeup_fd(-1)
    codes = _end(workers)
    if received:
        return exit_codes.code_after(received[0])
    logger.error("a worker has ended; the others were ended too")
    return next((code for code in codes if code == exit_codes.USAGE), exit_codes.FAILED)


def _end(workers: list[SpawnProcess]) -> list[int | None]:
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + _EXIT_SECONDS + _SPARE_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    return [worker.exitcode for worker in workers]


def _worker(options: ServeOptions, name: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rollfeed").setLevel(logging.INFO)
    # The parent tells its workers; Ctrl-C reaches them as well and would be one signal too many.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = exit_codes.FAILED
    try:
        code = serve_one(options, name=name)
    except ConfigError as error:
        print(f"rollfeed: {error}", file=sys.stderr)
        code = exit_codes.USAGE
    except RollfeedError as error:
        print(f"rollfeed: {error}", file=sys.stderr)
    sys.stderr.flush()
    # Taking the interpreter down in order takes seconds while a thread waits for the parent.
    os._exit(code)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
