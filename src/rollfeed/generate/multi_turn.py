"""The generate function for environments that answer back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollfeed.conversations import Conversation
from rollfeed.errors import PluginError, RewardError
from rollfeed.generate.episode import Episode
from rollfeed.generate.single_turn import single_turn
from rollfeed.protocols import MULTI_TURN, MultiTurnEnvironment, RolloutRequest, Services
from rollfeed.types import Completion, FinishKind, Sample, SampleStatus, Verdict


async def by_environment(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    """Answer the prompt in one turn, or in as many as its environment takes."""
    answer = multi_turn if request.prompt.metadata.get(MULTI_TURN) else single_turn
    return await answer(request, services=services)


async def multi_turn(request: RolloutRequest, *, services: Services) -> Sequence[Sample]:
    """Play an episode of the prompt's environment; its verdict is the reward.

    The episode is TRUNCATED where the response length or the context is used up, by the policy or by what it would be
    told next, and the environment says what it is worth then.

    Raises:
        PluginError: If the environment takes one turn only.
        RewardError: If the environment gives no reward.
    """
    prompt = request.prompt
    environment = services.environments.get(prompt.metadata["environment"])
    if not isinstance(environment, MultiTurnEnvironment):
        raise PluginError(f"environment {environment.environment_id}: it has no start, step and give_up")
    episode = Episode(request, services)
    conversation = Conversation(prompt, services.tokenizer, rewritten=services.rewritten_turns)
    state = environment.start(prompt.metadata["params"])
    while True:
        begun = len(episode.builder.token_ids)
        turn = await episode.sample()
        if turn.finish_reason.kind is FinishKind.ABORT:
            return episode.end(turn)
        if turn.finish_reason.kind is FinishKind.LENGTH:
            return _scored(episode, turn, environment.give_up(state), status=SampleStatus.TRUNCATED)
        step = environment.step(state, turn.text)
        if step.verdict is not None:
            return _scored(episode, turn, step.verdict, status=SampleStatus.COMPLETED)
        # Of a turn that was resumed, the completion has the last piece only.
        said = episode.builder.token_ids[begun:]
        state = step.state
        if not episode.follow(conversation.follow_up(said, step.messages)):
            return _scored(episode, turn, environment.give_up(state), status=SampleStatus.TRUNCATED)


def _scored(episode: Episode, last: Completion, verdict: Verdict, *, status: SampleStatus) -> list[Sample]:
    if verdict.reward is None:
        raise RewardError(f"the episode has no reward: {verdict.detail}")
    *forks, sample = episode.end(last)
    samples = [*forks, replace(sample, status=status)]
    return [replace(sample, reward=verdict.reward, correct=verdict.correct) for sample in samples]
