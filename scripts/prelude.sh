# Sourced by the scripts beside it; works from any folder, as root or not. Afterwards
#   ROOT      is the project's folder, and
#   PYTHON    the interpreter of its environment, with requirements-cpu.txt installed (anew only when it changed).
# Environment:
#   OFFBEAT_VENV            where the environment lies (default: ROOT/.venv)
#   OFFBEAT_PYTHON          the Python that makes it (default: python3.11, 3.12, 3.13 or python3)
#   OFFBEAT_TORCH_INDEX     a mirror of PyTorch's index of CPU builds
#   OFFBEAT_MEMINFO         read instead of /proc/meminfo
#   PYTHON                  an interpreter that has everything, on a GPU machine say (requirements.txt): nothing is installed

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${OFFBEAT_VENV:-$ROOT/.venv}"
GIVEN_PYTHON="${PYTHON:-}"
PYTHON="${GIVEN_PYTHON:-$VENV/bin/python}"
REQUIREMENTS="$ROOT/requirements-cpu.txt"

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

check_memory() {    # a container's limit counts where it is lower; 7.3 of 8 GB, since the kernel keeps some for itself
  local total limit
  total="$(awk '/^MemTotal/ {print $2}' "${OFFBEAT_MEMINFO:-/proc/meminfo}")"
  limit="$(cat /sys/fs/cgroup/memory.max 2>/dev/null || true)"
  if [[ "$limit" =~ ^[0-9]+$ ]] && ((limit / 1024 < total)); then total=$((limit / 1024)); fi
  ((total >= 7300000)) || fail "too little memory: 8 GB are needed, $((total / 1000000)) GB are there"
}

find_python() {     # prints a Python >= 3.11 that can make environments
  local candidate found=""
  for candidate in ${OFFBEAT_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    "$candidate" -c 'import sys' 2>/dev/null || continue
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      found+="; $candidate is $("$candidate" --version 2>&1)"
    elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
      found+="; $candidate has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
    else
      echo "$candidate"
      return
    fi
  done
  fail "no usable Python: version 3.11 or newer with venv is needed${found:-; none was found on PATH}"
}

make_venv() {
  [[ -x "$PYTHON" ]] && "$PYTHON" -m pip --version >/dev/null 2>&1 && return
  local python
  python="$(find_python)"
  say "making the environment $VENV with $("$python" --version 2>&1)"
  "$python" -m venv "$VENV" || fail "$VENV could not be made; OFFBEAT_VENV names another folder"
}

install() {         # install WHAT PIP-ARGUMENTS...: pip's output is the progress; a failure is explained
  local what="$1" log="$VENV/pip.log"
  shift
  say "installing $what"
  if ! "$PYTHON" -m pip install "$@" 2>&1 | tee "$log" >&2; then
    grep -qiE "NewConnection|NameResolution|ConnectTimeout|ReadTimeout|Connection aborted|versions: none" "$log" &&
      fail "no network: pip cannot reach a package index (the lines above name it)"
    grep -qi "No space left" "$log" && fail "the disk of $VENV or of ${TMPDIR:-/tmp} is full: 4 GB are needed"
    fail "pip failed (see above, or $log)"
  fi
}

install_requirements() {
  local torch index=()
  torch="$(grep -oE '^torch==[^ ]+' "$REQUIREMENTS")"
  # The CPU build of torch is not on PyPI. Where pip's own configuration shows it, that is used.
  "$PYTHON" -m pip install --dry-run --no-deps --quiet "$torch" >/dev/null 2>&1 ||
    index=(--extra-index-url "${OFFBEAT_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}")
  install "requirements-cpu.txt (about 2 GB on disk, some minutes)" -r "$REQUIREMENTS" "${index[@]}"
  sed -n 's/^#! //p' "$REQUIREMENTS" > "$VENV/no-deps.txt"
  install "the packages without their dependencies" --no-deps -r "$VENV/no-deps.txt"
}

prepare() {
  check_memory
  local wanted stamp="$VENV/installed.sha256" lock
  wanted="$(sha256sum < "$REQUIREMENTS")"
  [[ -x "$PYTHON" && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]] && return
  mkdir -p "$VENV" 2>/dev/null && [[ -w "$VENV" ]] || fail "$VENV is not writable; OFFBEAT_VENV names another folder"
  exec {lock}>"$VENV/install.lock"
  flock -n "$lock" || { say "waiting for another installation into $VENV"; flock -w 1800 "$lock"; } ||
    fail "the other installation has taken 30 minutes"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    make_venv
    install_requirements
    echo "$wanted" > "$stamp"
    say "installed"
  fi
  exec {lock}>&-
}

[[ -n "$GIVEN_PYTHON" ]] || prepare
