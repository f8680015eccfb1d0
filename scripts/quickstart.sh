#!/usr/bin/env bash
# Installs, makes a tiny model and an arithmetic task, and trains it with one-step-off GRPO on this machine's CPU.
#   bash scripts/quickstart.sh [--seed N] [any flag of train_async.py]      yours come last and win
# The last line is the evaluation before and after:  eval_reward 0.31 -> 0.84
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

SEED=0                                          # of the model, the data and the run
previous=""
for word in "$@"; do
  [[ "$previous" == --seed ]] && SEED="$word"
  [[ "$word" == --seed=* ]] && SEED="${word#--seed=}"
  previous="$word"
done
[[ "$SEED" =~ ^[0-9]+$ ]] || fail "--seed needs a whole number, is '$SEED'"

MODEL="$ROOT/models/tiny-seed$SEED"
"$PYTHON" "$ROOT/scripts/make_tiny_model.py" "$MODEL" --seed "$SEED"

MODEL_ARGS=(
  --hf-checkpoint "$MODEL"
)
DATA_ARGS=(
  --prompt-data "$MODEL/train.jsonl" --input-key prompt --label-key label
  --rollout-max-prompt-len 16
)
ROLLOUT_ARGS=(
  --num-rollout 100
  --rollout-batch-size 16 --n-samples-per-prompt 8
  --rollout-max-response-len 8 --rollout-temperature 1.0
  --rm-type exact
)
EVAL_ARGS=(
  --eval-prompt-data arithmetic "$MODEL/eval.jsonl"
  --n-samples-per-eval-prompt 8                 # 128 held-out prompts x 8: the mean's standard error is about 0.015
  --eval-interval 20
)
GRPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
  --lr 4e-4                                     # 1e-3 makes a model of this size forget what it knows
  --adam-beta2 0.95 --clip-grad 1.0
)
BATCH_ARGS=(
  --global-batch-size 128
  --use-dynamic-batch-size --max-tokens-per-gpu 4096
)
CLUSTER_ARGS=(
  --device cpu                                  # also where there is a GPU: the environment has no CUDA packages
  --actor-num-gpus-per-node 1 --rollout-num-gpus 1
)
RUN_ARGS=(
  --seed "$SEED"
  --output-dir "$ROOT/runs" --run-name "quickstart-seed$SEED-$(date +%Y%m%d-%H%M%S)"
  --save-interval 20
  --use-tensorboard
)

exec "$PYTHON" "$ROOT/train_async.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
  "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
