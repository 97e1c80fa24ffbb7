from dataclasses import replace

import numpy as np
import pytest

from rollfeed.batch import AgeLimit, cut_batch
from rollfeed.config import AdvantageSettings, StalenessPolicy
from rollfeed.testing import make_group, make_sample
from rollfeed.types import STALE, ByAge, Dropped, Group, Requeued, Rollout, VersionSpan


def group_of(group_index: int, *versions: tuple[int, ...]) -> Group:
    """Return a group with a member for each tuple, and a token for each of its versions."""
    samples = [
        replace(
            make_sample("7" * len(each), member=member),
            version_spans=tuple(VersionSpan(i, i + 1, version) for i, version in enumerate(each)),
            group_index=group_index,
        )
        for member, each in enumerate(versions)
    ]
    rollouts = tuple(Rollout(rollout_id=sample.rollout_id, samples=(sample,)) for sample in samples)
    return replace(make_group([0.0, 1.0], group_index=group_index), rollouts=rollouts)


OLD, MIXED, NEW, EMPTY = (
    group_of(0, (1,), (2, 2)),
    group_of(1, (1, 3), (5,)),
    group_of(2, (3,), (5,)),
    group_of(3, (), ()),
)


def sort(policy: StalenessPolicy, max_staleness: int | None = 2) -> ByAge:
    return AgeLimit(max_staleness=max_staleness, policy=policy)([OLD, MIXED, NEW, EMPTY], policy_version=5)


def test_groups_with_a_token_that_is_too_old_are_answered_again() -> None:
    assert sort(StalenessPolicy.REQUEUE) == ByAge(
        fresh=(NEW, EMPTY), old=(Requeued(OLD, STALE), Requeued(MIXED, STALE))
    )


def test_they_are_dropped_as_stale_where_policy_says_so() -> None:
    by_age = sort(StalenessPolicy.DROP)
    assert by_age == ByAge(fresh=(NEW, EMPTY), old=(Dropped(OLD, STALE), Dropped(MIXED, STALE)))


def test_masking_takes_the_old_tokens_and_answers_again_what_would_have_none_left() -> None:
    by_age = sort(StalenessPolicy.MASK)
    assert (by_age.old, by_age.masked_tokens) == ((Requeued(OLD, STALE),), 1)
    masked, *others = by_age.fresh
    assert others == [NEW, EMPTY]
    assert [sample.loss_mask.tolist() for sample in masked.samples] == [[0.0, 1.0], [1.0]]
    assert masked.oldest_trained_version == 3
    assert MIXED.samples[0].loss_mask.tolist() == [1.0, 1.0]


def test_tokens_without_weight_have_no_age() -> None:
    inserted = replace(MIXED.samples[0], loss_mask=np.array([0.0, 1.0], np.float32))
    group = replace(MIXED, rollouts=(Rollout(rollout_id=0, samples=(inserted,)),))
    assert AgeLimit(max_staleness=2, policy=StalenessPolicy.REQUEUE)([group], policy_version=5).fresh == (group,)


def test_samples_that_are_removed_do_not_make_a_group_worth_training_on() -> None:
    old, new = (replace(sample, remove_sample=bool(sample.index)) for sample in group_of(0, (1,), (5,)).samples)
    group = replace(OLD, rollouts=(Rollout(rollout_id=0, samples=(old,)), Rollout(rollout_id=1, samples=(new,))))
    assert AgeLimit(max_staleness=0, policy=StalenessPolicy.MASK)([group], policy_version=5).old == (
        Requeued(group, STALE),
    )


@pytest.mark.parametrize("policy", list(StalenessPolicy))
def test_without_a_limit_everything_is_new_enough(policy: StalenessPolicy) -> None:
    assert sort(policy, None) == ByAge(fresh=(OLD, MIXED, NEW, EMPTY))


def test_the_cut_makes_no_batch_of_groups_that_are_too_old() -> None:
    def cut(policy: StalenessPolicy):
        rule = AgeLimit(max_staleness=2, policy=policy)
        return cut_batch(
            [NEW, MIXED], step=0, policy_version=5, age_rule=rule, reward_key=None, estimator=AdvantageSettings()
        )

    assert cut(StalenessPolicy.REQUEUE) == ByAge(fresh=(NEW,), old=(Requeued(MIXED, STALE),))
    done = cut(StalenessPolicy.MASK)
    assert done.masked_tokens == 1
    assert done.batch.metrics["rollout/staleness_max"] == 2
    assert done.batch.metrics["rollout/trained_tokens"] == 4
