"""Fake SGLang servers and routers over real sockets: scripted, without latency, or on a model of time."""

from rollfeed.testing.fake_sglang.clock import Clock, LoopClock, Timer, VirtualClock
from rollfeed.testing.fake_sglang.launch import (
    Fakes,
    fake_settings,
    run_fakes,
    serve_fake_router,
    serve_fake_sglang,
    start_fake_sglang,
)
from rollfeed.testing.fake_sglang.router import FakeRouter
from rollfeed.testing.fake_sglang.server import FakeServer
from rollfeed.testing.fake_sglang.settings import (
    FakeMode,
    FakeSettings,
    FaultBook,
    FaultKind,
    Lie,
    RouterDialect,
    ScriptedReply,
    ServerFault,
    TimeModelSettings,
)
from rollfeed.testing.fake_sglang.time_model import (
    TimeModel,
    bound_seconds,
    bound_tokens_per_second,
    draw_length,
    mean_length,
)

__all__ = [
    "Clock",
    "FakeMode",
    "FakeRouter",
    "FakeServer",
    "FakeSettings",
    "Fakes",
    "FaultBook",
    "FaultKind",
    "Lie",
    "LoopClock",
    "RouterDialect",
    "ScriptedReply",
    "ServerFault",
    "TimeModel",
    "TimeModelSettings",
    "Timer",
    "VirtualClock",
    "bound_seconds",
    "bound_tokens_per_second",
    "draw_length",
    "fake_settings",
    "mean_length",
    "run_fakes",
    "serve_fake_router",
    "serve_fake_sglang",
    "start_fake_sglang",
]
