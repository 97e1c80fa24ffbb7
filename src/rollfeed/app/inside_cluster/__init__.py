"""The work of a cluster's nodes for a run: rollout workers, and reward workers."""
