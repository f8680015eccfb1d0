#!/usr/bin/env bash
# What is measured on more than two GPUs; last come the results, one line each. About nine minutes on eight.
#   GPUS=8 bash scripts/gpu/run_x8.sh [sync] [train] [async]        all of them by default, in this order; GPUS may be 4, too
#   bash scripts/gpu/run_x8.sh plan                                 memory that the layouts of `train` need, on any machine
# Environment: GPUS, and what measure.sh names
source "$(dirname "${BASH_SOURCE[0]}")/measure.sh"
GPUS="${GPUS:-8}"

# half of the GPUs train, the others generate; TRAIN: layouts with their GPUs, those of a line side by side
if [[ "$GPUS" == 8 ]]; then
  LAYOUTS=(tp2pp2 dp4) ENGINES=(2 4) WIDE=(2) ARMS=(sync one_step_off:4+4 partial:4+4 one_step_off:6+2)
  TRAIN=("tp2:0,1 pp2:2,3 tp2pp2:4,5,6,7" "dp8:0,1,2,3,4,5,6,7")
elif [[ "$GPUS" == 4 ]]; then
  LAYOUTS=(tp2 pp2 dp2) ENGINES=(1 2) WIDE=(1) ARMS=(sync one_step_off:2+2 partial:2+2 one_step_off:3+1)
  TRAIN=("tp2:0,1 pp2:2,3" "tp2pp2:0,1,2,3" "dp4:0,1,2,3")
else
  echo "run_x8.sh: GPUS is 4 or 8, not '$GPUS'" >&2; exit 2
fi
SHAPE=tiny SYNC=(--syncs 4) STEP=(--length 256 --samples 8 --steps 2) ASYNC=(--groups 6 --samples 4)
if [[ "$DEVICE" == cuda || "$*" == plan ]]; then
  SHAPE=8B SYNC=() STEP=(--max-tokens-per-gpu 4096)
  # 9 groups for each GPU; 3 GPUs and 6 divide their samples, too
  ASYNC=(--shape 2.5-3B --groups $((9 * GPUS)) --prompt-tokens 512 --longest 4096 --threshold 1.5 --max-tokens-per-gpu 9216
         --sglang-mem-fraction-static .35)
fi

train() {      # train [--dry-run]
  local line case
  for line in "${TRAIN[@]}"; do
    for case in $line; do
      CUDA_VISIBLE_DEVICES="${case#*:}" run "train-${case%:*}" scripts/bench_train.py "$SHAPE" --layout "${case%:*}" "${STEP[@]}" "$@" &
    done
    wait
  done
}

for part in "${@:-sync train async}"; do for part in $part; do
  case "$part" in
    sync) run sync1 scripts/bench_sync.py "$SHAPE" --layouts "${LAYOUTS[@]}" --engines "${ENGINES[@]}" "${SYNC[@]}" "${SERVER[@]}"
          run sync2 scripts/bench_sync.py "$SHAPE" --layouts "${LAYOUTS[@]}" --engines "${WIDE[@]}" \
            --rollout-num-gpus-per-engine 2 "${SYNC[@]}" "${SERVER[@]}" ;;
    train) train ;;
    plan) train --dry-run ;;
    async) run async scripts/gpu/bench_async_gpu.py --gpus "$GPUS" --arms "${ARMS[@]}" "${ASYNC[@]}" \
             --output-dir "$RESULTS/async" "${SERVER[@]}" ;;
    *) echo "run_x8.sh: there are sync, train, async and plan, not '$part'" >&2; exit 2 ;;
  esac
done; done
