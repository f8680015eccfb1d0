#!/usr/bin/env bash
# Does the quick start learn, and only by learning? Three seeds, each also with --lr 0: about 10 minutes on 2 cores.
#   bash scripts/check_quickstart.sh [SEED ...]
# With training the evaluation must rise by at least 0.25; without, it must stay within 0.1. Exit status 1 otherwise.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
status=0

check() {           # check NAME MIN MAX FLAGS...: the change of the evaluation must lie between MIN and MAX
  local name="$1" min="$2" max="$3" line before after
  shift 3
  line="$(bash "$here/quickstart.sh" "$@" | tee /dev/stderr | tail -n 1)"
  if [[ ! "$line" =~ ^eval_reward\ ([0-9.]+)\ -\>\ ([0-9.]+)$ ]]; then echo "$name: no result: $line"; status=1; return; fi
  before="${BASH_REMATCH[1]}" after="${BASH_REMATCH[2]}"
  if awk "BEGIN {d = $after - $before; exit !(d >= $min && d <= $max)}"; then table+="$name $line  ok"$'\n'
  else table+="$name $line  NOT within $min..$max"$'\n'; status=1; fi
}

table="" seeds=("$@")
((${#seeds[@]})) || seeds=(0 1 2)
for seed in "${seeds[@]}"; do
  check "seed $seed      " 0.25 1 --seed "$seed"
  check "seed $seed, lr 0" -0.1 0.1 --seed "$seed" --lr 0
done
printf '\n%s' "$table"
exit $status
