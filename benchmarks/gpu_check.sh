#!/usr/bin/env bash
# The GPU check: what one GPU says of this tree, in two calls of less than ten minutes, the most telling figures first.
#
#   benchmarks/gpu_check.sh first|second|PART... [--tiny] [--out FOLDER]
#
# first    versions and clocks; steps of CogVideoX-5B; the kernels' tests; the kernels' times
# second   steps of Sana and DiT; tests marked gpu; a bad sample, kill -9 and resume on a tiny model; the other models' steps
# PART...  these parts alone, by the names in their logs
# --tiny   everything at tiny sizes, on a CPU if there is no GPU: to see that it runs
#
# Needs bash, coreutils and an interpreter with torch and pytest: no make, no git, nothing is installed.
#   PYTHON            the interpreter; python3 if not given
#   PYTHONPATH        is kept, behind this tree's own folders
#   OUT               the folder of results, as --out; build/gpu-check if neither is given
#   DIT_LORA_COMMIT   the commit, where there is no git; so does a file COMMIT at the root
# Each part's output is shown and kept as it comes, in FOLDER/<part>.log; FOLDER/summary.txt says how each ended.
set -u -o pipefail

first="machine steps_video kernel_tests kernel_times"
second="steps_images gpu_tests recovery steps_more"
usage() { echo "usage: benchmarks/gpu_check.sh first|second|PART... [--tiny] [--out FOLDER]; parts: $first $second" >&2; exit 2; }
out=${OUT:-}; tiny=; parts=
while [ $# -gt 0 ]; do
  case $1 in
    --tiny) tiny=1; shift ;;
    --out) [ $# -ge 2 ] || usage; out=$2; shift 2 ;;
    first) parts="$parts $first"; shift ;;
    second) parts="$parts $second"; shift ;;
    *) case " $first $second " in *" $1 "*) parts="$parts $1"; shift ;; *) usage ;; esac ;;
  esac
done
[ -n "$parts" ] || usage

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${out:-$root/build/gpu-check}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$root" || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$root:$root/kernels:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
cores=$(nproc 2>/dev/null || echo 1)

device=cuda
if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
  if [ -z "$tiny" ]; then
    echo "gpu_check: $python has no torch that finds a CUDA device; --tiny goes through it on a CPU" >&2
    exit 1
  fi
  device=cpu
fi

ends=$((SECONDS + ${GPU_CHECK_SECONDS:-585}))
status=0
summary=$out/summary.txt
[ "$parts" = " $first" ] && : >"$summary"

tell() { echo "== $1" | tee -a "$summary"; }

# Looked for and not imported, which takes seconds each time.
kernels="torch pytest"
project="$kernels diffusers transformers accelerate peft av pydantic typer"
lacks() {
  "$python" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@"
}

# part NAME MOST LEAST PACKAGES COMMAND...: run it with at most MOST seconds, if LEAST are left and the packages are there.
part() {
  local name=$1 most=$2 least=$3 packages=$4; shift 4
  local left=$((ends - SECONDS)) began=$SECONDS code missing
  # shellcheck disable=SC2086 -- several names
  missing=$(lacks $packages)
  if [ -n "$missing" ]; then
    status=1; tell "$name: left out: $python has no $missing; docs/gpu.md lists the packages"; return
  fi
  if [ "$left" -lt "$least" ]; then
    status=1; tell "$name: left out: $left s are left, and it takes $least"; return
  fi
  [ "$most" -gt "$left" ] && most=$left
  echo "== $name: at most $most s"
  # Stopped as by Ctrl-C: pytest then still says what failed.
  BUDGET=$most timeout --signal=INT --kill-after=10 "$most" "$@" 2>&1 | tee "$out/$name.log"
  code=${PIPESTATUS[0]}
  case $code in
    0) tell "$name: done in $((SECONDS - began)) s" ;;
    124 | 137) status=1; tell "$name: stopped after $most s; what it had found is in $name.log and beside it" ;;
    *) status=1; tell "$name: failed with $code after $((SECONDS - began)) s" ;;
  esac
}

# Steps of some models, with tables in a folder of their own: those of one day have one name. The budget ends before the part's own limit does, so that the tables are whole.
steps() {
  local name=$1 most=$2 least=$3; shift 3
  [ -n "$tiny" ] && set -- tiny
  part "$name" "$most" "$least" "$project" bash -c \
    'exec "$0" -m benchmarks.step --device "$1" --out "$2" --steps "$3" --budget $((BUDGET - 25)) --models "${@:4}"' \
    "$python" "$device" "$out/$name" "$([ -n "$tiny" ] && echo 1 || echo 4)" "$@"
}

# Without tests/conftest.py, which needs Diffusers.
kernel_tests() {
  local spread=()
  [ -z "$(lacks xdist)" ] && spread=(-n "$cores")
  part kernel_tests 150 60 "$kernels" "$python" -m pytest -q --tb=short ${spread[@]+"${spread[@]}"} -p no:cacheprovider \
    --confcutdir=tests/dit_lora_kernels tests/dit_lora_kernels \
    -k "not sm90 and not mutants${tiny:+ and finite_norm}"
}

kernel_times() {
  local shapes=()
  [ -n "$tiny" ] && shapes=(--shapes tiny --seconds-per-case 0.01)
  part kernel_times 240 60 "$kernels" bash -c \
    'exec "$0" kernels/bench/bench.py --device "$1" --out "$2" --budget $((BUDGET - 25)) "${@:3}"' \
    "$python" "$device" "$out" ${shapes[@]+"${shapes[@]}"}
}

gpu_tests() {
  local files
  files=$(grep -rl 'mark.gpu' tests/dit_lora)
  # shellcheck disable=SC2086 -- names of files, without spaces
  part gpu_tests 150 60 "$project" "$python" -m pytest -q --tb=short -m gpu -p no:cacheprovider $files
}

machine() { part machine 60 5 "$kernels" "$python" -m benchmarks.machine --device "$device"; }

recovery() { part recovery 150 60 "$project" "$python" -m benchmarks.gpu_recovery --device "$device"; }
steps_video() { steps steps_video 250 40 cogvideox-5b; }
steps_images() { steps steps_images 260 40 sana-1.6b-b8 dit-xl2-b32 sana-1.6b-b4 dit-xl2-b64; }
steps_more() { steps steps_more 240 60 cogvideox-2b wan-1.3b cogvideox-1.5; }

for name in $parts; do "$name"; done
exit $status
