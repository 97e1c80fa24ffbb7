"""Replays: what a run did with its answers, done again with the answers that it stored."""

from rollfeed.app.replay.answer_rows import answer_reader
from rollfeed.app.replay.replaying import StepReplay, replay_run

__all__ = ["StepReplay", "answer_reader", "replay_run"]
