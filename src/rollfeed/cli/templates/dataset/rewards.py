"""The reward: a function of a response and its row."""


def exact(response, label, question):
    """Reward the right number with 1, and less where something follows it, so that there is something to learn from.

    Ask for what you need by its name: response, label, prompt, metadata, sample, or a column. Return a number, or
    several as {"correct": 1.0, "format": 0.5}. print() goes to the run's rewards.log, and `rollfeed check` shows it.
    """
    return len(label) / len(response) if response.startswith(label) else 0.0
