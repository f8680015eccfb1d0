#!/usr/bin/env bash
# Everything that is measured on GPUs; last come the results, one line each. Two GPUs; colocate and the first of train use one.
#   bash scripts/gpu/run_all.sh [sync] [async] [train] [smollm2] [colocate]        all of them by default, in this order
# Environment:
#   PYTHON        an interpreter with requirements.txt (default: python3)
#   SERVER_ARGS   flags of every engine (default: FlashAttention-3, PyTorch's sampling)
#   MODEL         folder of SmolLM2, made when it is not there (default: models/smollm2-135m)
#   RESULTS       folder of logs and runs (default: runs/gpu)
#   DEVICE        cpu for a rehearsal with tiny models, which takes minutes
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${PYTHON:-python3}" DEVICE="${DEVICE:-cuda}"
MODEL="${MODEL:-$ROOT/models/smollm2-135m}" RESULTS="${RESULTS:-$ROOT/runs/gpu}"
SERVER=() SYNC=(tiny --syncs 5) TRAIN=(tiny --length 256) TRAIN2=("${TRAIN[@]}" --gpus 2) ASYNC=(--groups 4 --samples 4)
SMOLLM2=(--steps 2 --rollout-batch-size 4 --max-tokens-per-gpu 1024) SHARED=(tiny --steps 2)
if [[ "$DEVICE" == cuda ]]; then
  read -ra SERVER <<< "${SERVER_ARGS:---sglang-attention-backend fa3 --sglang-sampling-backend pytorch}"
  SYNC=(0.6B 4B 8B) TRAIN=(4B) TRAIN2=(8B --gpus 2 --max-tokens-per-gpu 4096) SMOLLM2=() SHARED=(0.6B --steps 4)
  ASYNC=(--arms sync one_step_off partial --shape 2.5-3B --groups 36 --prompt-tokens 1024 --threshold 2
         --max-tokens-per-gpu 9216 --sglang-mem-fraction-static .35)
fi
mkdir -p "$RESULTS" && : > "$RESULTS/results.txt"

run() {   # run NAME SCRIPT ARGUMENTS...: the log goes to RESULTS/NAME.log too, what begins like a result to RESULTS/results.txt
  local name="$1" script="$2" started="$SECONDS"
  shift 2
  echo "== $name: $script $*"
  "$PYTHON" "$ROOT/$script" "$@" --device "$DEVICE" 2> "$RESULTS/$name.err" |
    tee "$RESULTS/$name.log" || { tail -3 "$RESULTS/$name.err"; echo "$name failed: $RESULTS/$name.err" >> "$RESULTS/results.txt"; }
  grep -E '^(sync|async|train|smollm2|colocate) ' "$RESULTS/$name.log" | sort -u >> "$RESULTS/results.txt"
  echo "== $name: $((SECONDS - started)) s"
}

trap 'echo; cat "$RESULTS/results.txt"' EXIT      # a run that is cut says what it has
for part in "${@:-sync async train smollm2 colocate}"; do for part in $part; do
  case "$part" in
    sync) run sync scripts/bench_sync.py "${SYNC[@]}" "${SERVER[@]}" ;;
    async) run async scripts/gpu/bench_async_gpu.py "${ASYNC[@]}" --output-dir "$RESULTS/async" "${SERVER[@]}" ;;
    train) run train1 scripts/bench_train.py "${TRAIN[@]}"
           run train2 scripts/bench_train.py "${TRAIN2[@]}" ;;
    smollm2) "$PYTHON" "$ROOT/scripts/make_smollm2.py" "$MODEL"
             run smollm2 scripts/gpu/smollm2.py "$MODEL" "${SMOLLM2[@]}" --output-dir "$RESULTS/smollm2" "${SERVER[@]}"
             "$PYTHON" "$ROOT/scripts/gpu/smollm2.py" --plot "$RESULTS/smollm2" ;;
    colocate) if [[ "$DEVICE" == cuda ]]; then
                "$PYTHON" "$ROOT/scripts/make_smollm2.py" "$MODEL"
                run colocate1 scripts/gpu/colocate.py "$MODEL" --output-dir "$RESULTS/colocate" "${SERVER[@]}"
              fi
              run colocate2 scripts/gpu/colocate.py "${SHARED[@]}" --output-dir "$RESULTS/colocate" "${SERVER[@]}" ;;
    *) echo "run_all.sh: there are sync, async, train, smollm2 and colocate, not '$part'" >&2; exit 2 ;;
  esac
done; done
