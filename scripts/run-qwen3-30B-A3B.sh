#!/usr/bin/env bash
# Qwen3-30B-A3B, a mixture of experts, with DAPO's settings on four nodes of 8 GPUs: two train, two generate, partial rollout.
# Code, model and runs lie on a disk that all nodes see, under the same path; python3 has requirements.txt on each of them.
#   hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B
#   pip install "ray[default]==2.60.0"                                         on all of them: what takes jobs
#   ray get-auth-token --generate > /dev/null                                  once; ~/.ray/auth_token goes to all of them
#   export RAY_AUTH_MODE=token                                                 in every shell, also that of who submits
#   ray start --head --dashboard-host 0.0.0.0                                  on the first node
#   ray start --address HEAD:6379                                              on each other one
#   ray job submit --address http://HEAD:8265 --no-wait -- \
#     env PYTHON=python3 bash "$PWD/scripts/run-qwen3-30B-A3B.sh"              `ray job logs`, `ray job stop` by the printed name
#   bash scripts/run-qwen3-30B-A3B.sh --dry-run                                layout, memory and times, on any machine
source "$(dirname "${BASH_SOURCE[0]}")/prelude.sh"

MODEL="${MODEL:-$ROOT/models/Qwen3-30B-A3B}"
MODEL_ARGS=(
  --hf-checkpoint "$MODEL" --bf16 --use-distributed-optimizer --recompute-granularity full
  --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4      # experts stay within a node
)
DATA_ARGS=(
  --prompt-data "${DATA:-$ROOT/data/dapo-math-17k.jsonl}" --input-key prompt --label-key label --apply-chat-template
  --rollout-max-prompt-len 2048
)
ROLLOUT_ARGS=(
  --num-rollout 300
  --rollout-batch-size 128 --n-samples-per-prompt 8             # 1,024 samples
  --rollout-max-response-len 16384 --rollout-temperature 1.0
  --rm-type math
)
ALGORITHM_ARGS=(
  --advantage-estimator grpo --loss-type gspo --eps-clip 3e-4 --eps-clip-high 4e-4      # the ratio of a sequence: routing moves
  --dynamic-sampling-filter --overlong-buffer-len 4096 --overlong-penalty-factor 1.0
)
ASYNC_ARGS=(
  --staleness-threshold 0.5 --partial-rollout --max-lag 2
)
OPTIMIZER_ARGS=(
  --lr 1e-6 --lr-warmup-iters 10 --weight-decay 0.1 --clip-grad 1.0
)
BATCH_ARGS=(
  --global-batch-size 256                                       # 4 updates; 32 samples for each of 8 data-parallel ranks
  --use-dynamic-batch-size --max-tokens-per-gpu 20480
)
CLUSTER_ARGS=(
  --device cuda --ray-address auto --actor-num-nodes 2 --actor-num-gpus-per-node 8
  --rollout-num-gpus 16 --rollout-num-gpus-per-engine 2
)
RUN_ARGS=(
  --output-dir "$ROOT/runs" --run-name "qwen3-30B-A3B-$(date +%Y%m%d-%H%M%S)" --save-interval 20
)

exec "$PYTHON" "$ROOT/train_fully_async.py" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGORITHM_ARGS[@]}" \
  "${ASYNC_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${BATCH_ARGS[@]}" "${CLUSTER_ARGS[@]}" "${RUN_ARGS[@]}" "$@"
