"""TRL's GRPOTrainer, its prompts answered by rollfeed: the line with rollout_func is the only one that is not TRL's.

python examples/trl/train.py MODEL [STEPS]
"""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from rollfeed.compat.trl import rollout_func


def is_short(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Reward short answers."""
    return [1.0 / len(ids) for ids in completion_ids]


def main(model: str, steps: int) -> None:
    questions = [f"What is {number} plus {number + 3}?" for number in range(64)]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=is_short,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in questions]),
        args=GRPOConfig(
            output_dir="trl-output",
            max_steps=steps,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=32,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        rollout_func=rollout_func,
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
