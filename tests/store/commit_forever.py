"""Commit steps to the run directory given, from where it stands, until killed; print each step when it is committed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rollfeed.store import RunDirectory
from rollfeed.types import (
    Dropped,
    Group,
    LedgerCounts,
    Prompt,
    Rollout,
    RunState,
    Sample,
    SampleStatus,
    StepCommit,
    TrainBatch,
    VersionSpan,
)


def group(group_index: int) -> Group:
    sample = Sample(
        token_ids=np.arange(20, dtype=np.int32),
        response_length=10,
        loss_mask=np.ones(10, np.float32),
        logprobs=np.zeros(10, np.float32),
        version_spans=(VersionSpan(0, 10, 0),),
        status=SampleStatus.COMPLETED,
        group_index=group_index,
        index=group_index,
        rollout_id=group_index,
        reward=1.0,
    )
    prompt = Prompt(prompt_id=str(group_index), source="s", text="", token_ids=np.arange(10, dtype=np.int32))
    return Group(group_index=group_index, prompt=prompt, rollouts=(Rollout(rollout_id=group_index, samples=(sample,)),))


def step_commit(step: int) -> StepCommit:
    return StepCommit(
        batch=TrainBatch(
            step=step,
            policy_version=0,
            groups=(group(2 * step),),
            advantages_S=np.zeros(1, np.float32),
            metrics={"rollout/reward_mean": 1.0},
        ),
        dropped=(Dropped(group=group(2 * step + 1), reason="zero_std_1.0"),),
        wasted_tokens={"dropped": 10},
        state=RunState(
            next_step=step + 1,
            next_group_index=2 * step + 2,
            source={"cursor": step},
            ledger=LedgerCounts(drawn=2 * step, trained=step, dropped=step),
        ),
    )


def main() -> None:
    with RunDirectory.open(Path(sys.argv[1]), settings={}, identity={"seed": 1}, overwrite=False) as run:
        step = run.state.next_step if run.state else 1
        print(step - 1, flush=True)
        while True:
            run.commit(step_commit(step), reward_key=None)
            print(step, flush=True)
            step += 1


main()
