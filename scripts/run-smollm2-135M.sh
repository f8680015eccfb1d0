#!/usr/bin/env bash
# SmolLM2-135M-Instruct, a real pretrained model, learns sums of one and two digits: on two CPU cores in well under an hour, on
# GPUs in minutes. Data and score are reasoning-gym's own.
#   bash scripts/run-smollm2-135M.sh [any flag of train_async.py]                     on the CPU; yours come last and win
#   ALGORITHM=dapo bash scripts/run-smollm2-135M.sh                                   clip-higher, dynamic sampling, overlong penalty
#   PYTHON=python3 bash scripts/run-smollm2-135M.sh --rollout-num-gpus 1              on two GPUs; python3 has requirements.txt
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

ALGORITHM="${ALGORITHM:-grpo}"
MODEL="${MODEL:-$ROOT/models/smollm2-135m}"
[[ " $* " == *" --dry-run "* ]] || "$PYTHON" "$ROOT/scripts/make_smollm2.py" "$MODEL"
TASK="reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"

MODEL_ARGS=(
  --hf-checkpoint "$MODEL"
)
DATA_ARGS=(
  --prompt-data "$TASK&size=4000&seed=1"
  --rollout-max-prompt-len 32
)
ROLLOUT_ARGS=(
  --num-rollout 40
  --rollout-batch-size 8 --n-samples-per-prompt 8
  --rollout-max-response-len 8 --rollout-temperature 1.0      # the model says " 12." and, until it has learned, goes on
  --rm-type reasoning_gym
)
EVAL_ARGS=(
  --eval-prompt-data sums "$TASK&size=128&seed=100000"
  --eval-interval 10
)
case "$ALGORITHM" in
  grpo) ALGORITHM_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.2) ;;
  dapo) ALGORITHM_ARGS=(--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --loss-agg-mode token-mean
                        --dynamic-sampling-filter --overlong-buffer-len 4 --overlong-penalty-factor 0.2) ;;
  *) fail "ALGORITHM is grpo or dapo, not '$ALGORITHM'" ;;
esac
OPTIMIZER_ARGS=(
  --lr 1e-5 --adam-beta2 0.95 --clip-grad 1.0
)
BATCH_ARGS=(
  --use-dynamic-batch-size --max-tokens-per-gpu 1024
)
CLUSTER_ARGS=(
  --actor-num-gpus-per-node 1 --rollout-num-gpus 1
)
RUN_ARGS=(
  --output-dir "$ROOT/runs" --run-name "smollm2-$ALGORITHM-$(date +%Y%m%d-%H%M%S)"
)

exec "$PYTHON" "$ROOT/train_async.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
  "${ALGORITHM_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
