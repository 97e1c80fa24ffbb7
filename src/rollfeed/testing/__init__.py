"""Parts for the tests of rollfeed and of its plug-ins: an engine, a tokenizer and a source without a model."""

from rollfeed.testing.builders import group_of, make_group, make_prompt, make_request, make_sample, sample_of
from rollfeed.testing.contracts import (
    check_advantage,
    check_batched_reward,
    check_engine,
    check_environment,
    check_generate,
    check_group_filter,
    check_group_reward,
    check_prompt_source,
    check_reward,
    check_rollout,
    check_sample_hook,
    check_tool,
    check_tracker,
)
from rollfeed.testing.index_checks import check_batch_filter, check_buffer_policy
from rollfeed.testing.prompts import END_OF_TURN, CharTokenizer, ListSource
from rollfeed.testing.scripted import Fault, ScriptedEngine, ScriptedRequest, TickEngine, answer_by_seed

__all__ = [
    "END_OF_TURN",
    "CharTokenizer",
    "Fault",
    "ListSource",
    "ScriptedEngine",
    "ScriptedRequest",
    "TickEngine",
    "answer_by_seed",
    "check_advantage",
    "check_batch_filter",
    "check_batched_reward",
    "check_buffer_policy",
    "check_engine",
    "check_environment",
    "check_generate",
    "check_group_filter",
    "check_group_reward",
    "check_prompt_source",
    "check_reward",
    "check_rollout",
    "check_sample_hook",
    "check_tool",
    "check_tracker",
    "group_of",
    "make_group",
    "make_prompt",
    "make_request",
    "make_sample",
    "sample_of",
]
