#!/usr/bin/env bash
# Qwen2.5-Math-7B with DAPO on 16 GPUs: 12 train, 4 generate, one-step-off. Training GPUs lie on two nodes, 6 on each.
#   hf download Qwen/Qwen2.5-Math-7B --local-dir models/Qwen2.5-Math-7B        on a disk that all nodes see
#   PYTHON=python3 bash scripts/run-qwen2.5-7B-dapo.sh --ray-address auto      in a Ray cluster; python3 has requirements.txt
#   bash scripts/run-qwen2.5-7B-dapo.sh --dry-run                              layout and memory, on any machine
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

MODEL="${MODEL:-$ROOT/models/Qwen2.5-Math-7B}"
MODEL_ARGS=(
  --hf-checkpoint "$MODEL" --bf16 --use-distributed-optimizer --recompute-granularity full
)
DATA_ARGS=(
  --prompt-data "${DATA:-$ROOT/data/dapo-math-17k.jsonl}" --input-key prompt --label-key label --apply-chat-template
  --rollout-max-prompt-len 1024
)
ROLLOUT_ARGS=(
  --num-rollout 300
  --rollout-batch-size 96 --n-samples-per-prompt 16             # 1,536 samples
  --rollout-max-response-len 3072 --rollout-temperature 1.0      # the model has 4,096 positions
  --rm-type math
)
ALGORITHM_ARGS=(
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --loss-agg-mode token-mean
  --dynamic-sampling-filter --overlong-buffer-len 512 --overlong-penalty-factor 1.0
)
OPTIMIZER_ARGS=(
  --lr 1e-6 --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0
)
BATCH_ARGS=(
  --global-batch-size 384                                       # 4 updates; 32 samples for each of 12 ranks
  --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
CLUSTER_ARGS=(
  --device cuda --actor-num-nodes 2 --actor-num-gpus-per-node 6 --rollout-num-gpus 4
)
RUN_ARGS=(
  --output-dir "$ROOT/runs" --run-name "qwen2.5-7B-dapo-$(date +%Y%m%d-%H%M%S)" --save-interval 50
)

exec "$PYTHON" "$ROOT/train_async.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGORITHM_ARGS[@]}" \
  "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
