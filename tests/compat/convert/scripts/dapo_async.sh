# Fully asynchronous, with a filter on flat groups, on servers that run already, and a YAML file of evaluation sets.
set -euo pipefail
: "${SERVERS:=10.0.0.1:30000 10.0.0.2:30000}"
cd "$(dirname "$0")" || exit 1
HUB=slime.rollout.filter_hub
common="--hf-checkpoint tiny --prompt-data data/questions.jsonl --input-key prompt --label-key label"
common+=" --rm-type dapo --reward-key score"
declare -a ARGS=()
ARGS+=(--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async)
ARGS+=(--num-epoch 2 --rollout-batch-size 4 --n-samples-per-prompt=4 --over-sampling-batch-size 6
       --dynamic-sampling-filter-path ${HUB}.dynamic_sampling_filters.check_reward_nonzero_std)
ARGS+=(--rollout-max-response-len 48 --rollout-max-context-len 192 --rollout-external-engine-addrs $SERVERS)
ARGS+=(--eval-interval 5 --eval-config eval.yaml --eval-max-response-len 64)
ARGS+=(--calculate-per-token-loss --use-tis --eps-clip 0.2 --eps-clip-high 0.28 --eps-clip-c 3.0)
for seed in 5; do
  python train_async.py $common "${ARGS[@]}" --rollout-seed $seed "$@" > log.txt 2>&1 &
done
wait
