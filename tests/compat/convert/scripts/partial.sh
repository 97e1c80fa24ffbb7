#!/usr/bin/env bash
# Partial rollouts with a reward server, without a trainer.
MODE=${MODE:-partial}
case "$MODE" in
  partial) MODE_ARGS=(--partial-rollout --mask-offpolicy-in-partial-rollout) ;;
  *)       MODE_ARGS=() ;;
esac
CMD="python3 train.py --debug-rollout-only --hf-checkpoint tiny --prompt-data data/questions.jsonl
  --input-key prompt --label-key label --num-rollout 4 --rollout-batch-size 4 --n-samples-per-prompt 2
  --over-sampling-batch-size 8 --rollout-max-response-len 32 --rollout-stop-token-ids 5 6 --rm-type remote_rm
  --rm-url http://127.0.0.1:9000/score ${MODE_ARGS[*]}"
eval $CMD
