"""Generate functions where none is the user's, and the gateway through which agents ask the policy."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollfeed import plugins
from rollfeed.app.model import Endpoint
from rollfeed.config import RolloutConfig, RolloutMode
from rollfeed.config.agent import AgentSettings
from rollfeed.errors import ConfigError
from rollfeed.generate import default_generate, given_answer
from rollfeed.protocols import AgentFn, GenerateFn

if TYPE_CHECKING:
    from rollfeed.gateway.policy import Caps, ServedPolicy

_INTERPRETERS = ("python", "python3")


@asynccontextmanager
async def serve_gateway(
    endpoint: Endpoint,
    policy: ServedPolicy,
    *,
    caps: Caps,
    max_sessions: int,
    folder: Path | None,
    token: str,
    host: str,
    port: int,
) -> AsyncIterator[str]:
    """Serve a gateway while the block runs; give its address.

    Sessions and their pictures are kept in ``folder``; without it sessions in memory, and of pictures the last.
    ``token`` is what operators need; empty where they need none.

    Raises:
        ConfigError: If they cannot be kept there, or the address cannot be listened on.
    """
    # Imported here, as in _agent_player: a web server is not needed where no agent asks.
    from rollfeed.base.serving import serve_application
    from rollfeed.gateway.gateway_server import GatewayServer
    from rollfeed.gateway.session_journal import FolderJournal, SessionJournal
    from rollfeed.gateway.sessions import Sessions

    journal = SessionJournal() if folder is None else FolderJournal(folder)
    endpoint.keep_pictures(None if folder is None else folder / "pictures")
    try:
        sessions = Sessions(policy, endpoint, caps=caps, max_sessions=max_sessions, journal=journal)
        application = GatewayServer(sessions, token=token).application()
        async with endpoint, serve_application(application, host=host, port=port, descriptors_each=2) as address:
            yield address
    finally:
        journal.close()


def generate_fn(config: RolloutConfig, *, folders: Sequence[Path], evaluation: bool = False) -> GenerateFn:
    """Return what answers prompts where no function of the user's does.

    An evaluation asks the policy, also where what is trained on are the answers of a data set.

    Raises:
        ConfigError: If the agent does not exist, or does not fit.
    """
    if config.agent.answers:
        return _agent_player(config.agent, folders=folders)
    if config.rollout.mode is RolloutMode.SFT and not evaluation:
        return partial(given_answer, mask_type=config.rollout.loss_mask_type)
    return default_generate


def _agent_player(settings: AgentSettings, *, folders: Sequence[Path]) -> GenerateFn:
    from rollfeed.gateway.playing import AgentPlayer

    function = plugins.load_plugin(settings.function, AgentFn, key="agent.function", folders=folders)
    if not settings.command:
        return AgentPlayer(settings, function)
    program, *others = settings.command
    found = sys.executable if program in _INTERPRETERS else shutil.which(_placed(program, folders))
    if found is None:
        raise ConfigError(f"agent.command = {program!r}: there is no such program; give one on PATH, or its path")
    command = (str(Path(found).absolute()), *(_placed(each, folders) for each in others))
    return AgentPlayer(settings.model_copy(update={"command": command}), None)


def _placed(argument: str, folders: Sequence[Path]) -> str:
    """Return the path of a file beside the settings file, where an argument names one."""
    return next((str(path.resolve()) for folder in folders if (path := folder / argument).is_file()), argument)
