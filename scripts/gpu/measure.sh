# Sourced by run_all.sh and run_x8.sh: where things are, and `run`. Environment:
#   PYTHON        an interpreter with requirements.txt (default: python3)
#   SERVER_ARGS   flags of every engine (default: FlashAttention-3, PyTorch's sampling)
#   RESULTS       folder of logs and runs (default: runs/gpu)
#   DEVICE        cpu for a rehearsal with tiny models, which takes minutes
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
PYTHON="${PYTHON:-python3}" DEVICE="${DEVICE:-cuda}" RESULTS="${RESULTS:-$ROOT/runs/gpu}"
SERVER=()
if [[ "$DEVICE" == cuda ]]; then
  read -ra SERVER <<< "${SERVER_ARGS:---sglang-attention-backend fa3 --sglang-sampling-backend pytorch}"
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
