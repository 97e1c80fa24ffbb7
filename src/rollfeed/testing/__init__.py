"""Parts for the tests of rollfeed and of its plug-ins: an engine, a tokenizer and a source without a model."""

from rollfeed.testing.batch_filter import check_batch_filter
from rollfeed.testing.buffer_policy import check_buffer_policy
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
    check_tracker,
    make_group,
    make_prompt,
    make_sample,
)
from rollfeed.testing.scripted import Fault, ScriptedEngine, ScriptedRequest, answer_by_seed
from rollfeed.testing.sources import ListSource
from rollfeed.testing.tokenizer import END_OF_TURN, CharTokenizer

__all__ = [
    "END_OF_TURN",
    "CharTokenizer",
    "Fault",
    "ListSource",
    "ScriptedEngine",
    "ScriptedRequest",
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
    "check_tracker",
    "make_group",
    "make_prompt",
    "make_sample",
]
