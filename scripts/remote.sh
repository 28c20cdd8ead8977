#!/usr/bin/env bash
# A remote machine as disposable executor: the working tree goes there as it is, a command runs, and
# what it recorded comes back. scripts/remote.env says which machine, `remote.sh --help` the rest.
#
# Functions called remote_* run over there: `there` sends them through ssh's standard input to a
# bash. Only "bash -s" ever meets the login shell, so no argument is parsed twice, and that shell
# may be any. A command runs as a job: detached, in a process group of its own, its output in a log
# that outlives the connection, and under a lock, so that two measurements never share the machine.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
ENV_FILE=$ROOT/scripts/remote.env

# Exit codes of our own; any other is that of the command that ran.
readonly FAULT=1 USAGE=2 BUSY=75 UNREACHED=255
readonly VANISHED='ended without an exit code: it was killed, or the machine was restarted'

usage() {
    cat <<'HELP'
usage: scripts/remote.sh [--env FILE] COMMAND

  setup             copy the tree there and install what requirements.txt pins into its environment
                    (a torch that is there already is kept, if it is new enough)
  bench NAME...     copy the tree, run python -m nanoserve.bench NAME... there, bring results/ back
  run COMMAND...    the same with any command; its arguments arrive as they are, no shell reads them
  fetch             bring results/ and the logs back, finished or not, and say how the last job is
  attach            show the last job's output from its beginning and follow it to its end (Ctrl-C
                    leaves the job alone)
  stop              interrupt the job that is running, as Ctrl-C does during bench and run

The tree is copied without a commit; what git ignores stays here. Files that were deleted here are
deleted there, except results/: records there are never replaced, records here are only added to.
A job goes on when the connection is lost: attach or fetch later. Logs come to .remote/jobs/.

The machine is described in scripts/remote.env (from scripts/remote.env.example), or in --env FILE.
Exit code: that of the remote command; 2 a wrong request, 1 a fault, 75 another job is running
there, 130 Ctrl-C, 255 the machine cannot be reached or the connection was lost.
HELP
}

say() { printf 'remote.sh: %s\n' "$*" >&2; }

die() {
    local code=$1
    shift
    say "$@"
    exit "$code"
}

# ----------------------------------------------------------------------------- what runs over there

# DIR WANTED: make DIR ours, and refuse where a job is running or (WANTED is the checksum of
# requirements.txt, or empty) its environment is not the one that is wanted.
remote_prepare() {
    local dir=$1 wanted=$2 tool missing=()
    for tool in rsync flock tail; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if ((${#missing[@]})); then
        echo "it lacks ${missing[*]} (Debian, Ubuntu: apt-get install rsync util-linux coreutils)"
        return 1
    fi
    # The copy deletes what is not in the tree, so it must never meet somebody's home.
    if [[ ! -d $dir/.remote && -n $(ls -A -- "$dir" 2>/dev/null) ]]; then
        echo "its folder $dir holds other things: name a new one in REMOTE_DIR"
        return 1
    fi
    mkdir -p -- "$dir/.remote/jobs" "$dir/results" || return 1
    cd -- "$dir"
    if ! flock --shared --nonblock .remote/lock true; then
        echo "job $(<.remote/last) is running there: attach, stop, or wait"
        return 75 # BUSY
    fi
    if [[ $wanted && ! -e .remote/venv/.complete ]]; then
        echo "there is no environment yet: run setup first"
        return 1
    elif [[ $wanted && $(<.remote/venv/.complete) != "$wanted" ]]; then
        echo "requirements.txt has changed since setup: run setup again"
        return 1
    fi
}

# DIR JOB TITLE COMMAND...: begin a job and leave it behind.
remote_start() {
    local job=.remote/jobs/$2
    cd -- "$1"
    exec 9>>.remote/lock
    flock --nonblock 9 || { echo 'another job was faster' >&2 && return 75; }
    mkdir -- "$job"
    printf '%s\n' "$3" >"$job/title"
    echo "$2" >.remote/last
    set -m # its own process group, in which Ctrl-C means something
    remote_job "$job" "${@:4}" >"$job/log" 2>&1 </dev/null &
    echo "$!" >"$job/pid"
}

# JOB COMMAND...: the job itself; it holds the lock until its exit code is written.
remote_job() {
    local job=$1 code=0
    shift
    trap '' HUP   # the connection may go
    trap : INT TERM # these are for the command; the code has still to be written
    export PYTHONUNBUFFERED=1
    if [[ -e .remote/venv/.complete ]]; then
        export VIRTUAL_ENV=$PWD/.remote/venv PATH=$PWD/.remote/venv/bin:$PATH
    fi
    "$@" 9>&- || code=$?
    echo "$code" >"$job/code.new"
    mv -- "$job/code.new" "$job/code"
}

# DIR [JOB]: one line, "JOB running", "JOB ended CODE", "JOB vanished" or "none".
remote_state() {
    cd -- "$1"
    local job=${2:-}
    [[ $job || ! -e .remote/last ]] || job=$(<.remote/last)
    if [[ -z $job ]]; then
        echo none
    elif ! [[ -e .remote/jobs/$job/code ]] && ! flock --shared --nonblock .remote/lock true; then
        echo "$job running"
    elif [[ -e .remote/jobs/$job/code ]]; then
        echo "$job ended $(<".remote/jobs/$job/code")"
    else
        echo "$job vanished"
    fi
}

# DIR JOB: its output so far, and what is still to come.
remote_follow() {
    local job=.remote/jobs/$2 state
    state=$(remote_state "$1" "$2")
    cd -- "$1"
    if [[ $state == *running ]]; then
        tail -n +1 -s 0.2 -f --pid="$(<"$job/pid")" -- "$job/log"
    else
        cat -- "$job/log"
    fi
}

# DIR JOB: interrupt it, and insist if it does not end.
remote_stop() {
    local signal tenths
    cd -- "$1"
    for signal in INT TERM KILL; do
        [[ $(remote_state . "$2") == *running ]] || return 0
        kill "-$signal" -- "-$(<".remote/jobs/$2/pid")" || true
        for ((tenths = 0; tenths < 100; tenths++)); do
            [[ $(remote_state . "$2") == *running ]] || return 0
            sleep 0.1
        done
    done
}

# PYTHON TORCH CHECKSUM, in the tree, as a job: make .remote/venv hold what requirements.txt pins.
remote_install() {
    local python=$1 torch=$2 checksum=$3 venv=.remote/venv there=''
    local wanted='name Python 3.11 or newer in REMOTE_PYTHON'
    if ! command -v "$python" >/dev/null; then
        echo "there is no $python: $wanted" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$("$python" --version 2>&1) is too old: $wanted" >&2
        return 1
    fi
    if [[ $torch == auto ]]; then
        there=$("$python" -c 'import os, torch
print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) || there=''
    fi
    rm -f -- "$venv/.complete" "$venv"/lib/python3.*/site-packages/torch-of-the-machine.pth
    if ! "$python" -m venv "$venv"; then
        echo "no environment could be made: Debian and Ubuntu keep the module in python3-venv" >&2
        return 1
    fi
    # Built without isolation, because setuptools is among the pins; so the project comes last.
    local pins=.remote/requirements.txt
    grep -v '^--editable' requirements.txt >"$pins"
    if [[ $there ]]; then
        echo "torch is taken from $there, unless it is too old"
        "$venv/bin/python" -c 'import pathlib, sys, sysconfig
folder = pathlib.Path(sysconfig.get_path("purelib"))
(folder / "torch-of-the-machine.pth").write_text(sys.argv[1] + "\n")' "$there" || return
        sed 's/^torch==.*/torch/' "$pins" >"$pins.new"
        mv -- "$pins.new" "$pins"
    fi
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    # One that came with the environment would hide the one beside torch, maybe the pinned one.
    [[ -z $there ]] || "${pip[@]}" uninstall --quiet --yes setuptools || return
    pip+=(install --progress-bar off)
    "${pip[@]}" --requirement "$pins" || return
    "${pip[@]}" --no-build-isolation --editable '.[torch]' || return
    "$venv/bin/python" -c '
import torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
place = ", ".join(gpus) or "the CPU (torch sees no GPU)"
print("ready: torch", torch.__version__, "on", place)' || return
    echo "$checksum" >"$venv/.complete"
}

# ------------------------------------------------------------------------------- the way over there

# For a list that bash reads again, wherever it does.
quote() { printf '%q ' "$@"; }

# For rsync's --rsh, which splits at spaces and knows quotes, but no backslashes.
quote_for_rsync() {
    local word
    for word in "$@"; do
        printf "'%s' " "${word//\'/\'\'}"
    done
}

load_environment() {
    [[ -f $ENV_FILE ]] || die $USAGE "there is no $ENV_FILE:" \
        "copy scripts/remote.env.example to scripts/remote.env and name your machine in it"
    ! grep -q $'\r' "$ENV_FILE" ||
        die $USAGE "$ENV_FILE has the line ends of Windows, which bash takes for parts of the values"
    # shellcheck source=/dev/null # what it may set is in scripts/remote.env.example
    source "$ENV_FILE" || die $USAGE "$ENV_FILE cannot be read as bash"
    [[ ${REMOTE_HOST:-} ]] || die $USAGE "REMOTE_HOST is not set in $ENV_FILE"
    REMOTE_DIR=${REMOTE_DIR:-nanoserve}
    # A quoted ~ reaches us as it is, and no shell will expand it over there.
    # shellcheck disable=SC2088
    [[ $REMOTE_DIR != '~/'* ]] || REMOTE_DIR=${REMOTE_DIR:2}
    REMOTE_TORCH=${REMOTE_TORCH:-auto}
    [[ $REMOTE_TORCH == auto || $REMOTE_TORCH == pinned ]] ||
        die $USAGE "REMOTE_TORCH is auto or pinned, got $REMOTE_TORCH"
    [[ -z ${REMOTE_KEY:-} || -r $REMOTE_KEY ]] ||
        die $USAGE "REMOTE_KEY: there is no key $REMOTE_KEY that can be read"

    # What the user sets stands first, because ssh takes the first value it meets.
    SSH=(ssh ${REMOTE_SSH_OPTIONS[@]+"${REMOTE_SSH_OPTIONS[@]}"}
        -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4
        -o StrictHostKeyChecking=accept-new -o LogLevel=ERROR)
    [[ -z ${REMOTE_PORT:-} ]] || SSH+=(-p "$REMOTE_PORT")
    [[ -z ${REMOTE_USER:-} ]] || SSH+=(-l "$REMOTE_USER")
    [[ -z ${REMOTE_KEY:-} ]] || SSH+=(-i "$REMOTE_KEY" -o IdentitiesOnly=yes)
    [[ -z ${REMOTE_JUMP:-} ]] || SSH+=(-J "$REMOTE_JUMP")
    local tool
    for tool in ssh rsync; do
        command -v "$tool" >/dev/null || die $FAULT "this machine lacks $tool (apt-get install" \
            "openssh-client rsync)"
    done
}

# FUNCTION ARGUMENTS...: run one of the functions above in REMOTE_DIR.
there() {
    local name=$1
    shift
    {
        declare -f remote_prepare remote_start remote_job remote_state remote_follow remote_stop
        echo 'set -euo pipefail'
        quote "$name" "$REMOTE_DIR" "$@"
        echo '</dev/null' # or it would read on where bash reads its script
    } | "${SSH[@]}" -- "$REMOTE_HOST" 'bash -s'
}

# OPTIONS... FROM TO: rsync over the same connection; a path there begins with ":".
copy() {
    local code=0 host=$REMOTE_HOST paths=("${@: -2}")
    [[ $host != *:* ]] || host="[$host]" # an IPv6 address
    paths=("${paths[@]/#:/$host:}")
    rsync --rsh="$(quote_for_rsync "${SSH[@]}")" --protect-args --links --perms --times --compress \
        "${@:1:$#-2}" -- "${paths[@]}" || code=$?
    case $code in
    0) ;;
    10 | 12 | 30 | 35 | 255) die $UNREACHED "the connection was lost, says rsync (code $code)" ;;
    *) die $FAULT "copying failed (rsync code $code)" ;;
    esac
}

# WANTED [BUSY]: see remote_prepare. Says what stands in the way; BUSY: a running job does not.
reach() {
    local errors code=0
    errors=$(there remote_prepare "$1" 2>&1) || code=$?
    errors=${errors//$'\r'/}
    case $code:$errors in
    0:*) ;;
    "${2:-none}":*) ;;
    255:*'Permission denied'*) die $UNREACHED "$REMOTE_HOST refuses us: check REMOTE_USER and" \
        "REMOTE_KEY, or load the key into ssh-agent (passwords are not asked for). $errors" ;;
    255:*'verification failed'* | 255:*'HAS CHANGED'*) die $UNREACHED "$REMOTE_HOST shows another" \
        "host key than before; if it is a new machine at an old address: ssh-keygen -R" \
        "followed by the name or [name]:port" ;;
    255:*) die $UNREACHED "$REMOTE_HOST cannot be reached: check REMOTE_HOST, REMOTE_PORT and" \
        "REMOTE_JUMP. $errors" ;;
    127:*) die $FAULT "on $REMOTE_HOST: bash is needed there: $errors" ;;
    *) die "$code" "on $REMOTE_HOST: $errors" ;;
    esac
}

# The tree as it is, without what git ignores. Of .git goes what names the commit in a record: its
# configuration may hold secrets.
push() {
    local git=(--exclude=/.git)
    [[ ! -d $ROOT/.git ]] || git=(--exclude='/.git/config*' --exclude=/.git/hooks
        --exclude=/.git/logs --include='/.git/***')
    [[ ! -f $ROOT/.git ]] || say "this is a linked worktree of git: records will name no commit"
    # Our .gitignore decides also about what is deleted there: hence after, when it has arrived.
    copy --recursive --delete-after "${git[@]}" --exclude=/.remote --exclude=/scripts/remote.env \
        --exclude=/results --filter=':- .gitignore' "$ROOT/" ":$REMOTE_DIR/"
    [[ ! -d $ROOT/results ]] ||
        copy --recursive --ignore-existing "$ROOT/results/" ":$REMOTE_DIR/results/"
}

# --------------------------------------------------------------------------------- and the way back

# A file without the line that is still being written.
whole_lines() {
    [[ -s $1 ]] || return 0
    if [[ -n $(tail -c 1 -- "$1") ]]; then sed '$d' -- "$1"; else cat -- "$1"; fi
}

# FETCHED OURS: records are appended here, whatever each side has that the other has not.
merge_records() {
    local known=$1.known new=$1.new num_lines
    [[ -e $2 ]] || : >"$2"
    whole_lines "$2" >"$known"
    whole_lines "$1" | known=$known awk '
        BEGIN { while ((getline line < ENVIRON["known"]) > 0) seen[line] }
        !($0 in seen)' >"$new"
    num_lines=$(wc -l <"$new")
    if ((num_lines)); then
        cat -- "$new" >>"$known"
        mv -- "$known" "$2"
        say "fetched ${2#"$ROOT"/} (new records: $((num_lines)))"
    fi
}

fetch_results() {
    local stage file ours
    mkdir -p -- "$ROOT/.remote/jobs" "$ROOT/results"
    copy --recursive --exclude=pid --exclude=code.new \
        ":$REMOTE_DIR/.remote/jobs/" "$ROOT/.remote/jobs/"
    stage=$(mktemp -d "$ROOT/.remote/fetched.XXXXXX")
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf -- $(quote "$stage")" EXIT
    mkdir -- "$stage/results"
    copy --recursive --prune-empty-dirs --compare-dest="$ROOT/results/" ":$REMOTE_DIR/results/" \
        "$stage/results/"
    while IFS= read -r -d '' file; do
        ours=$ROOT/${file#"$stage"/}
        mkdir -p -- "$(dirname -- "$ours")"
        if [[ $file == *.jsonl ]]; then
            merge_records "$file" "$ours"
        elif [[ ! -e $ours || $file -nt $ours ]]; then
            mv -- "$file" "$ours"
            say "fetched ${ours#"$ROOT"/}"
        fi
    done < <(find "$stage/results" -type f -print0 | sort -z)
    rm -rf -- "$stage"
    trap - EXIT
}

# ----------------------------------------------------------------------------------------- commands

# TITLE WANTED COMMAND...: send the tree, run, bring back; ends with the command's exit code.
execute() {
    local title=$1 wanted=$2 job code=0
    job=$(date -u +%Y%m%dT%H%M%SZ)-$RANDOM
    reach "$wanted"
    push
    there remote_start "$job" "$title" "${@:3}" || code=$?
    ((code != UNREACHED)) || die $UNREACHED "the connection was lost; fetch says whether $job began"
    ((code == 0)) || die "$code" "job $job did not begin"
    follow "$job"
}

# JOB [leave]: its output here until it ends, then its results; ends with its exit code. Ctrl-C ends
# the job too, unless we are to leave it.
follow() {
    local job=$1 state interrupted=''
    [[ ${2:-} == leave ]] || trap 'interrupted=yes' INT
    there remote_follow "$job" || true # its end is asked below: a 255 could be ssh's or the job's
    trap - INT
    if [[ $interrupted ]]; then
        say "stopping job $job"
        there remote_stop "$job" || true
    fi
    state=$(there remote_state "$job") || state='unknown, still running'
    [[ $state != *running ]] || die $UNREACHED \
        "the connection was lost; job $job goes on: attach follows it, fetch brings its results"
    fetch_results
    [[ $state != *vanished ]] ||
        die $FAULT "job $job $VANISHED"
    [[ -z $interrupted ]] || exit 130
    local code=${state##* }
    ((code == 0)) || say "the remote command ended with $code; its log: .remote/jobs/$job/log"
    exit "$code"
}

# Exits if there is none; else its state is in STATE, its name in JOB.
find_last_job() {
    reach '' $BUSY
    STATE=$(there remote_state) || die $UNREACHED "the connection was lost"
    JOB=${STATE%% *}
}

checksum() { cksum <"$ROOT/requirements.txt"; }

setup_command() {
    execute setup '' bash -c "$(declare -f remote_install)"$'\nremote_install "$@"' setup \
        "${REMOTE_PYTHON:-python3}" "$REMOTE_TORCH" "$(checksum)"
}

bench_command() {
    local argument previous='' folder
    for argument in "$@"; do
        folder=''
        [[ $previous != --out ]] || folder=$argument
        [[ $argument != --out=* ]] || folder=${argument#--out=}
        previous=$argument
        [[ -z $folder ]] || [[ $folder/ == results/* && $folder/ != */../* ]] ||
            die $USAGE "--out $folder: only results/ and folders in it come back"
    done
    execute "bench $*" "$(checksum)" python -m nanoserve.bench "$@"
}

fetch_command() {
    find_last_job
    fetch_results
    case $STATE in
    none) say "no job has run there yet" ;;
    *running) say "job $JOB is still running: attach follows it, fetch again brings the rest" ;;
    *vanished) say "job $JOB $VANISHED" ;;
    *) say "job $JOB ended with ${STATE##* }; its log: .remote/jobs/$JOB/log" ;;
    esac
}

attach_command() {
    find_last_job
    [[ $STATE != none ]] || die $USAGE "no job has run there yet"
    follow "$JOB" leave
}

stop_command() {
    find_last_job
    [[ $STATE == *running ]] || die $USAGE "no job is running there"
    there remote_stop "$JOB" || die $UNREACHED "the connection was lost before job $JOB had ended"
    fetch_results
    say "job $JOB was stopped"
}

refuse_arguments() {
    (($# == 1)) || die $USAGE "$1 takes no arguments, got: ${*:2}"
}

main() {
    if [[ ${1:-} == --env ]]; then
        (($# > 1)) || die $USAGE "--env needs a file"
        ENV_FILE=$2
        shift 2
    fi
    local command=${1:-}
    case $command in
    -h | --help | help)
        usage
        return
        ;;
    setup | fetch | attach | stop) refuse_arguments "$@" ;;
    bench | run) (($# > 1)) || die $USAGE "$command what? See $0 --help" ;;
    '') usage >&2 && exit $USAGE ;;
    *) die $USAGE "there is no command $command: setup, bench, run, fetch, attach, stop" ;;
    esac
    load_environment
    shift
    case $command in
    run) execute "run $*" '' "$@" ;;
    *) "${command}_command" "$@" ;;
    esac
}

main "$@"
