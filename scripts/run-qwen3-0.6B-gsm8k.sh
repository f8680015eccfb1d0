#!/usr/bin/env bash
# Qwen3-0.6B learns GSM8K, with one GPU (engine and trainer share it) or two (one each, one-step-off). Data come from the hub.
#   hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
#   PYTHON=python3 bash scripts/run-qwen3-0.6B-gsm8k.sh [any flag of the script]      python3 has requirements.txt
#   GPUS=1 PYTHON=python3 bash scripts/run-qwen3-0.6B-gsm8k.sh
#   bash scripts/run-qwen3-0.6B-gsm8k.sh --dry-run                                    layout and memory, on any machine
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

GPUS="${GPUS:-2}"
MODEL="${MODEL:-$ROOT/models/Qwen3-0.6B}"
MODEL_ARGS=(
  --hf-checkpoint "$MODEL" --bf16
)
DATA_ARGS=(
  --prompt-data "openai/gsm8k?name=main&split=train" --input-key question --label-key answer
  --apply-chat-template --apply-chat-template-kwargs '{"enable_thinking": false}'
  --rollout-max-prompt-len 512
)
ROLLOUT_ARGS=(
  --num-rollout 200
  --rollout-batch-size 64 --n-samples-per-prompt 8
  --rollout-max-response-len 1024 --rollout-temperature 1.0
  --rm-type math
)
EVAL_ARGS=(
  --eval-prompt-data gsm8k "openai/gsm8k?name=main&split=test"
  --eval-interval 20
)
ALGORITHM_ARGS=(
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
  --lr 1e-6 --adam-beta2 0.98 --weight-decay 0.1
)
BATCH_ARGS=(
  --use-dynamic-batch-size --max-tokens-per-gpu 16384
)
case "$GPUS" in
  1) SCRIPT=train_sync.py CLUSTER_ARGS=(--device cuda --actor-num-gpus-per-node 1 --colocate --sglang-mem-fraction-static 0.5) ;;
  2) SCRIPT=train_async.py CLUSTER_ARGS=(--device cuda --actor-num-gpus-per-node 1 --rollout-num-gpus 1) ;;
  *) fail "GPUS is 1 or 2, not '$GPUS'" ;;
esac
RUN_ARGS=(
  --output-dir "$ROOT/runs" --run-name "qwen3-0.6B-gsm8k-$(date +%Y%m%d-%H%M%S)" --save-interval 50
)

exec "$PYTHON" "$ROOT/$SCRIPT" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
  "${ALGORITHM_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
