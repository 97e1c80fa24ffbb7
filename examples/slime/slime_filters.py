"""Five dynamic filters of the older kind: True drops a group.

``[plugins] group_filters = ["slime_drop:slime_filters.is_all_wrong"]``
"""

from slime.utils.types import Sample


def is_reward_zero_std(args, samples: list[Sample], **kwargs) -> bool:
    """Drop a group whose rewards are equal."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return max(rewards) - min(rewards) < 1e-6


def is_all_correct(args, samples: list[Sample], **kwargs) -> bool:
    """Drop a group that is right throughout."""
    return all(sample.get_reward_value(args) > 0 for sample in samples)


def is_all_wrong(args, samples: list[Sample], **kwargs) -> bool:
    """Drop a group that is wrong throughout."""
    return all(sample.get_reward_value(args) <= 0 for sample in samples)


def is_at_least_half_correct(args, samples: list[Sample], **kwargs) -> bool:
    """Drop a group half of which is right."""
    return sum(sample.get_reward_value(args) > 0 for sample in samples) >= args.n_samples_per_prompt // 2


def is_too_much_truncated(args, samples: list[Sample], **kwargs) -> bool:
    """Drop a group of which more than half reached the limit of length."""
    truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
    return sum(truncated) / len(truncated) > 0.5
