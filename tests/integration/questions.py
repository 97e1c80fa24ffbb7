"""Settings of a training that is evaluated on questions of a file, by a reward function of the test's own."""

QUESTIONS = """
[train.optimizer]
learning_rate = 1e-2

[reward]
override_environments = true

[plugins]
reward = "{reward}"

[eval]
n_samples_per_prompt = {n_samples}

[[eval.datasets]]
path = "questions.jsonl"
label_key = "answer"
"""
OPTIONS = ("--set", "rollout.deterministic=true", "--set", "sampling.min_new_tokens=1")
