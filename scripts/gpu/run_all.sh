#!/usr/bin/env bash
# Everything that is measured on GPUs; last come the results, one line each. Two GPUs; colocate and the first of train use one.
#   bash scripts/gpu/run_all.sh [sync] [async] [train] [smollm2] [colocate]        all of them by default, in this order
# Environment: MODEL, a folder of SmolLM2, made when it is not there (default: models/smollm2-135m), and what measure.sh names
source "$(dirname "${BASH_SOURCE[0]}")/measure.sh"
MODEL="${MODEL:-$ROOT/models/smollm2-135m}"
SYNC=(tiny --syncs 5) TRAIN=(tiny --length 256) TRAIN2=("${TRAIN[@]}" --gpus 2) ASYNC=(--groups 4 --samples 4)
SMOLLM2=(--steps 2 --rollout-batch-size 4 --max-tokens-per-gpu 1024) SHARED=(tiny --steps 2)
if [[ "$DEVICE" == cuda ]]; then
  SYNC=(0.6B 4B 8B) TRAIN=(4B) TRAIN2=(8B --gpus 2 --max-tokens-per-gpu 4096) SMOLLM2=() SHARED=(0.6B --steps 4)
  ASYNC=(--arms sync one_step_off partial --shape 2.5-3B --groups 36 --prompt-tokens 1024 --threshold 1.5
         --max-tokens-per-gpu 9216 --sglang-mem-fraction-static .35)
fi
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
