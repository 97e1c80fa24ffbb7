"""The work of a cluster's nodes for a run: rollout workers, reward workers, and the trainer."""
