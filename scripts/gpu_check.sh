#!/usr/bin/env bash
# Everything that needs a GPU, in one unattended run: the tests marked `gpu`, then every benchmark in
# its quick form. It installs nothing, needs no network, and ends within its time whatever hangs.
#
# What it leaves is small: at most 8 files of at most 16 MiB, all in one folder, so that a machine
# that is lent for minutes can hand them back.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

readonly FAILED=1 USAGE=2
readonly TESTS_S=180 RESERVE_S=15 # what the tests may take of the time; what packing may need
readonly LOG_BYTES=$((4 << 20)) PART_BYTES=$((15 << 20)) MAX_PARTS=4

usage() {
    cat <<'HELP'
usage: scripts/gpu_check.sh --out DIR [--seconds N]

  --out DIR     where results go; a new or empty folder
  --seconds N   for everything together (default 460; at least 60)

Runs the tests marked `gpu` (tests/test_gpu.py), then `nanoserve bench all --quick --device cuda`,
with the torch and triton that are here. PYTHON names another interpreter than python3. In DIR:

  summary.txt           what ran, how it ended, a line for each file of records
  tests.log bench.log   their output (the last 4 MiB)
  records.tar.gz.NN     results/ of this run, in parts of 15 MiB: cat records.tar.gz.* | tar xz

Exit code: 0 both succeeded; 1 one did not; 2 a wrong request, or no GPU that PyTorch can use.
HELP
}

die() {
    printf 'gpu_check.sh: %s\n' "$*" >&2
    exit "$USAGE"
}

# ------------------------------------------------------------------------------------- the request

out='' budget=460
while (($#)); do
    case $1 in
    --help | -h)
        usage
        exit 0
        ;;
    --out | --seconds)
        (($# > 1)) || die "$1 needs a value (see --help)"
        if [[ $1 == --out ]]; then out=$2; else budget=$2; fi
        shift 2
        ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
[[ $out ]] || die '--out DIR is missing: where results go'
if ! [[ $budget =~ ^[1-9][0-9]{1,4}$ ]] || ((budget < 60)); then
    die "--seconds must be a whole number of at least 60, got '$budget'"
fi
mkdir -p -- "$out" || die "--out $out cannot be made"
out=$(cd -- "$out" && pwd)
[[ -z $(ls -A -- "$out") ]] || die "--out $out is not empty: name a new folder"

PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || die "there is no '$PYTHON' (PYTHON names the interpreter)"

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
SECONDS=0

export PYTHONPATH=$ROOT/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 TRITON_INTERPRET=0 TRITON_CACHE_DIR=$work/triton XDG_CACHE_HOME=$work/cache

HAS_GPU='
import sys

try:
    import torch, triton
except ImportError as error:
    sys.exit(f"it lacks {error.name}")
if not torch.cuda.is_available():
    sys.exit("PyTorch finds no GPU")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
'
machine=$(timeout 60 "$PYTHON" -c "$HAS_GPU" 2>&1) ||
    die "$PYTHON cannot use a GPU here: ${machine##*$'\n'}"

# ------------------------------------------------------------------------------------------- the run

# NAME SECONDS COMMAND...: run it, its output in NAME.log; its exit code in `code`, 124 out of time.
step() {
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    code=0
    timeout --signal=INT --kill-after=5 "$limit" "$@" >"$work/$name.log" 2>&1 </dev/null || code=$?
    tail -c "$LOG_BYTES" -- "$work/$name.log" >"$out/$name.log"
    local ended="exit code $code"
    if ((code == 124 || code == 137)); then ended="out of time ($limit s)"; fi
    ((code)) || ended=passed
    local last
    last=$(grep -v '^[[:space:]]*$' "$work/$name.log" | tail -n 1 | cut -c 1-120 || true)
    printf '%-8s %-22s %4d s  %s\n' "$name" "$ended" $((SECONDS - began)) "$last" |
        tee -a "$out/summary.txt"
}

# A line for each file of records: how many samples, and how its last run ended.
list_records() {
    [[ -d $work/results ]] || return 0
    local file outcome
    find "$work/results" -name '*.jsonl' | sort | while IFS= read -r file; do
        outcome=$(grep -o '"kind": *"end".*' "$file" | grep -oE '"(complete|void)"' | tail -n 1 || true)
        printf '%-56s %6d samples  %s\n' "${file#"$work/results/"}" \
            "$(grep -cE '"kind": *"sample"' "$file" || true)" "${outcome:-unfinished}"
    done
}

# results/ in parts that are small enough; exit code 1 if there would be too many.
pack_records() {
    [[ -d $work/results ]] || return 0
    tar -C "$work" -czf "$work/records.tar.gz" results
    local bytes
    bytes=$(stat -c %s -- "$work/records.tar.gz")
    if ((bytes > PART_BYTES * MAX_PARTS)); then
        echo "records take $bytes bytes, more than $((PART_BYTES * MAX_PARTS)): left out"
        return 1
    fi
    split -b "$PART_BYTES" -d -- "$work/records.tar.gz" "$out/records.tar.gz."
}

cd -- "$ROOT"
echo "$machine" | tee "$out/summary.txt"
limit=$((budget - RESERVE_S))
step tests $((TESTS_S < limit / 2 ? TESTS_S : limit / 2)) "$PYTHON" -m pytest -c /dev/null \
    --rootdir "$ROOT" --noconftest -p no:cacheprovider -q -m gpu tests/test_gpu.py
tests=$code
step bench $((limit - SECONDS)) "$PYTHON" -m nanoserve.bench all --quick --device cuda \
    --out "$work/results"
bench=$code
list_records | tee -a "$out/summary.txt"
packed=0
pack_records | tee -a "$out/summary.txt" || packed=1
((tests == 0 && bench == 0 && packed == 0)) || exit "$FAILED"
