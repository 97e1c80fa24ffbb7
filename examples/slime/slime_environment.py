"""Problems made as they are needed, harder as the policy gets better, in the manner of RLVE.

``[plugins] prompt_source = "slime:slime_environment.AdditionSource"``, ``reward = "slime:slime_environment.check"`` and
``slime_args.rollout_all_samples_process_path = "slime_environment.learn"``.
"""

import json
import random
from pathlib import Path

from slime.rollout.data_source import DataSource
from slime.utils.types import Sample


class AdditionSource(DataSource):
    """Sums of numbers of as many digits as the difficulty says."""

    def __init__(self, args):
        self.args = args
        self.difficulty, self.num_problems = 1, 0
        self.num_right, self.num_seen = 0, 0

    def get_samples(self, num_samples):
        """Return groups, each with one problem."""
        return [self._group() for _ in range(num_samples)]

    def _group(self):
        numbers = random.Random(f"{self.args.rollout_seed}/{self.num_problems}")
        self.num_problems += 1
        low, high = 10 ** (self.difficulty - 1), 10**self.difficulty - 1
        left, right = numbers.randint(low, high), numbers.randint(low, high)
        metadata = {"problem_difficulty": self.difficulty}
        return [
            Sample(prompt=f"{left} + {right} = ", label=str(left + right), metadata=dict(metadata))
            for _ in range(self.args.n_samples_per_prompt)
        ]

    def add_samples(self, samples):
        """Take nothing back: problems are made anew."""

    def update(self, samples):
        """Raise the difficulty when nine of ten answers at it are right."""
        for sample in samples:
            if sample.metadata["problem_difficulty"] == self.difficulty:
                self.num_seen += 1
                self.num_right += sample.reward > 0
        if self.num_seen >= 8:
            self.difficulty += self.num_right >= 0.9 * self.num_seen
            self.num_right = self.num_seen = 0

    def save(self, rollout_id):
        """Write the state."""
        state = {"difficulty": self.difficulty, "num_problems": self.num_problems}
        Path(self.args.save, f"addition_{rollout_id}.json").write_text(
            json.dumps({**state, "num_right": self.num_right, "num_seen": self.num_seen})
        )

    def load(self, rollout_id=None):
        """Read the state."""
        vars(self).update(json.loads(Path(self.args.load, f"addition_{rollout_id}.json").read_text()))


async def check(args, sample: Sample, **kwargs) -> float:
    """Compare the answer with the sum."""
    return float(sample.response.strip() == sample.label)


def learn(args, all_samples, data_source):
    """Tell the source how groups ended, those that were filtered out included."""
    for group in all_samples:
        data_source.update(group)
