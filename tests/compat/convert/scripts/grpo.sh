#!/bin/bash
# Group-relative training of a small model on arithmetic, engines and trainer on the same GPUs.

pkill -9 sglang
sleep 3
ray stop --force
set -ex

export PYTHONBUFFERED=16
NUM_LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o "NV[0-9]" | wc -l)
if [ "$NUM_LINKS" -gt 0 ]; then
    HAS_NVLINK=1
else
    HAS_NVLINK=0
fi

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/model.sh"
DATA="${HERE}/data"
BATCH=8

CKPT_ARGS=(
   --hf-checkpoint tiny
   #--hf-checkpoint /models/other
   --ref-load /ckpt/base_torch_dist
   --load /ckpt/run/
   --save /ckpt/run/
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data ${DATA}/questions.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template-kwargs '{"enable_thinking": false}'
   --rollout-shuffle
   --rm-type math
   --num-rollout 30
   --rollout-batch-size ${BATCH}
   --n-samples-per-prompt 4
   --rollout-max-response-len 64
   --rollout-temperature 0.8
   --global-batch-size $((BATCH * 4))
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data held ${DATA}/held.jsonl
   --n-samples-per-eval-prompt 2
   --eval-max-response-len 96
   --eval-top-p 0.7
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --recompute-granularity full
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

WANDB_ARGS=(
   # --use-wandb
   # --wandb-project demo
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
   # dropout is on in Megatron
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --attention-backend flash
)

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8 --disable-usage-stats

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\",
    \"NCCL_NVLS_ENABLE\": \"${HAS_NVLINK}\"
  }
}"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   "${ROLLOUT_ARGS[@]}" \
   ${OPTIMIZER_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${SGLANG_ARGS[@]} \
   ${MISC_ARGS[@]}
