#!/usr/bin/env bash
# A run on Hugging Face Jobs: submits the trainer's Job, which starts and cancels its vLLM replicas.
#
#   BUCKET=me/lora ./launch.sh      a run: about one hour, $25 per hour with three replicas
#   ./launch.sh --local             the same files on this machine: no GPU, no account, five minutes
#   ./launch.sh --check             checks account, bucket and exposed port: a few minutes, one cent
#   ./launch.sh --dry-run           prints the commands and the dollars per hour, submits nothing
#   ./launch.sh --detach            leaves the run once it is submitted; so does a closed terminal
#   ./launch.sh --attach            follows the run named RUN, from any machine; Ctrl-C leaves it
#   ./launch.sh --stop              cancels every Job of the run named RUN, from any machine
#
# On GPU machines of your own, each with the bucket mounted at $MOUNT (serve.sh says more):
#   BIND=10.0.0.11 SEED=1 ./launch.sh serve docker
#   REPLICA_URLS=http://10.0.0.11:8000 RUN=first ./launch.sh docker
#
# You should see the id of the trainer's Job, the ids of its replicas, `the replicas are ready`, and
# then one [train] line per step. Ctrl-C cancels all Jobs. The same RUN resumes from its newest
# checkpoint. The exit code is 0 only if the trainer completed.
# shellcheck disable=SC2154,SC2329,SC2015 # `settings` sets variables, traps call functions
set -euo pipefail
say() { echo "[launch] $*"; }
die() { say "$*" >&2; exit 1; }
((BASH_VERSINFO[0] >= 5)) || die "bash 5 is needed, found $BASH_VERSION: brew install bash"
cd "$(dirname "${BASH_SOURCE[0]}")"
[[ " $* " != *" --local "* ]] || exec bash local/setup.sh "$@"

DRY_RUN=${DRY_RUN:-}
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1 && shift; }
action=${1:-run}
action=${action#--}
[[ $DRY_RUN$action == @(?(1)@(run|check|docker|serve)|detach|attach|stop|trainer) &&
  ($# -lt 2 || $action == serve) ]] ||
  { sed -n '2,/^# checkpoint/s/^# \{0,1\}//p' launch.sh >&2 && exit 2; }
[[ -n ${RUN:-} || $action != @(attach|stop) ]] || die "which run? RUN=... ./launch.sh --$action"

# ---- Yours to change, here or as `MODEL=org/other ./launch.sh`; the recipe's own constants are in
# train.py. The trainer's Job gets this list, too.

BUCKET=${BUCKET:-${NAMESPACE:+$NAMESPACE/lora}}
settings=(
  # user/name; made if it is not there
  "BUCKET=$BUCKET"
  # an organisation, which is billed instead of you
  "NAMESPACE=${NAMESPACE:-}"
  # the run's directory in the bucket
  "RUN=${RUN:-run-$(date +%Y%m%d-%H%M%S)}"
  "REPLICAS=${REPLICAS:-3}"
  "MODEL=${MODEL:-Qwen/Qwen2.5-Math-1.5B}"
  "DATASET=${DATASET:-sail/Sanity-Test-R1D-1.5B}"
  # empty: no evaluation
  "EVAL_DATASET=${EVAL_DATASET-HuggingFaceH4/MATH-500}"
  "MAX_STEPS=${MAX_STEPS:-500}"
  # policies; serve.sh derives --max-loras from it
  "MAX_STALENESS=${MAX_STALENESS:-4}"
  # serve.sh derives --max-lora-rank from it
  "LORA_RANK=${LORA_RANK:-1}"
  # tokens: prompt + completion
  "CONTEXT=${CONTEXT:-4096}"
  "TRAIN_SCRIPT=${TRAIN_SCRIPT:-train.py}"
  # trainer processes; gpu: one per GPU
  "RANKS=${RANKS:-gpu}"
  "TRACKIO_SPACE_ID=${TRACKIO_SPACE_ID-${BUCKET:+${NAMESPACE:-${BUCKET%%/*}}/async-grpo-lora}}"
  # where every Job sees the bucket
  "MOUNT=${MOUNT:-/lora}"
  # of a replica
  "PORT=${PORT:-8000}"
  # in the trainer's Job
  "PROXY_PORT=${PROXY_PORT:-8000}"
  # 1: the Jobs' own network instead of exposed ports
  "NETWORK_GROUP=${NETWORK_GROUP:-}"
  # the rule for a replica's address: see start_replicas
  "REPLICA_URL=${REPLICA_URL:-}"
  "IMAGE=${IMAGE:-vllm/vllm-openai:v0.27.1}"
  "REPLICA_FLAVOR=${REPLICA_FLAVOR:-h200}"
  # of each Job: one that fails starts again
  "ATTEMPTS=${ATTEMPTS:-3}"
  # of each Job, in case nothing is left to cancel it
  "TIMEOUT=${TIMEOUT:-6h}"
  # until all replicas must answer
  "START_MINUTES=${START_MINUTES:-30}"
  # seconds between two looks at the Jobs
  "POLL_S=${POLL_S:-10}"
)
export "${settings[@]}" DRY_RUN CODE_DIR CODE_VOLUME HF_HUB_DISABLE_UPDATE_CHECK=1
TRAINER_FLAVOR=${TRAINER_FLAVOR:-h200x2}
# dollars per hour: hf jobs hardware
declare -A PRICE=([h200]=5 [h200x2]=10)
# where the trainer's Job sees these scripts
CODE_DIR=${CODE_DIR:-/code}
# what brings them there; hf uploads it
CODE_VOLUME=${CODE_VOLUME:-./.local/code-$RUN:$CODE_DIR:ro}
# An http_proxy of your network is not for the proxy of this run.
export {no_proxy,NO_PROXY}="127.0.0.1,localhost,${no_proxy:-${NO_PROXY:-}}"

# ---- Jobs, which are found by their labels: those are the same on every machine

namespace=(${NAMESPACE:+--namespace "$NAMESPACE"})
# a label: Jobs with it must not outlive this process
at_end=''

# hf has no deadline of its own. And timeout keeps Ctrl-C from it: a request that is cut short may
# have made a Job whose id nobody knows.
hf_jobs() { timeout 120 hf jobs "$1" "${namespace[@]}" "${@:2}"; }
# ids of the active ones, newest first
run_jobs() { hf_jobs list --quiet --label "run=$RUN" "$@"; }

cancel() { # Jobs with label $1, until none is left
  local ids deadline=$((SECONDS + 60))
  until ids=$(run_jobs --label "$1") && [[ -z $ids ]]; do
    ((SECONDS < deadline)) || die "not known to have ended: ${ids:-any Job}: look with hf jobs list"
    say "cancelling ${ids//$'\n'/ }"
    xargs -n 1 -P 8 timeout 60 hf jobs cancel "${namespace[@]}" <<<"$ids" >/dev/null || true
    sleep 2
  done
}

finish() { # at any exit
  local code=$?
  trap : INT TERM HUP
  # The staged copy of the scripts has been uploaded, or is not needed any more.
  # shellcheck disable=SC2046
  rm -rf ".local/code-$RUN" && kill $(jobs -p) 2>/dev/null || true
  [[ -z $at_end ]] || (cancel "$at_end") || code=1
  # torchrun gives its processes 30 s
  wait
  exit "$code"
}

# bash runs a trap at once only while it waits for a background process.
interruptible() { "$@" & wait $!; }

step() { # runs a command; --dry-run prints it
  if [[ -z $DRY_RUN ]]; then interruptible "$@"; else printf '%q ' "$@" && echo; fi
}

# ---- The trainer: in its Job, or on a machine whose owner names the replicas in REPLICA_URLS

# replica[slot] is the id of a Job that has not ended; slots are 1..REPLICAS
replica=()

trainer() {
  local pip deadline proxy torch='' needed=$REPLICAS token=${HF_TOKEN:-}
  # the proxy has two connections per request in flight
  ulimit -n "$(ulimit -Hn)"
  export TRL_EXPERIMENTAL_SILENCE=1 TQDM_DISABLE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
  # its warnings are none here: a list of callbacks, say
  export TRANSFORMERS_VERBOSITY=error
  ! (: <>"/dev/tcp/127.0.0.1/$PROXY_PORT") 2>/dev/null || die "PROXY_PORT=$PROXY_PORT is in use"
  [[ -d $MOUNT ]] && mkdir -p "$MOUNT/$RUN" ||
    die "MOUNT=$MOUNT: the bucket is expected there, mounted read-write, with space left"

  pip=(interruptible python3 -m pip install --quiet --root-user-action ignore -r requirements.txt)
  "${pip[@]}" || "${pip[@]}" || "${pip[@]}" || die "pip failed three times: its error is above"
  interruptible python3 "$TRAIN_SCRIPT" check || die "no replica is started, for the reason above"

  deadline=$((SECONDS + START_MINUTES * 60))
  [[ -n ${REPLICA_URLS:-} ]] || start_replicas
  # Machines of your own get VLLM_API_KEY or nothing.
  [[ -n $at_end || $REPLICA_URLS == *.hf.jobs* ]] || token=''
  HF_TOKEN=$token REPLICA_URLS=$REPLICA_URLS python3 proxy.py & proxy=$!
  while [[ -z $torch ]] || kill -0 "$torch" 2>/dev/null; do
    kill -0 "$proxy" 2>/dev/null || die "proxy.py has ended: its error is above"
    [[ -z $at_end ]] || look_at_replicas "$needed"
    [[ -n $torch ]] || ((SECONDS < deadline)) || die "not ready in $START_MINUTES min, see [proxy]"
    if [[ -z $torch ]] && curl -sfm 10 -o /dev/null "http://127.0.0.1:$PROXY_PORT/health"; then
      say "the replicas are ready"
      torchrun --nproc-per-node "$RANKS" "$TRAIN_SCRIPT" & torch=$! needed=1
    fi
    sleep "$POLL_S" &
    wait -n ${torch:+"$torch"} "$proxy" $! || true
  done
  wait "$torch" || die "$TRAIN_SCRIPT failed, as it says above; RUN=$RUN resumes"
}

start_replicas() { # adopts the Jobs of an earlier attempt, starts the others; sets REPLICA_URLS
  local slot url reason rule=${REPLICA_URL:-https://ID--$PORT.hf.jobs}
  # the stand-in exposes ports below its own address
  [[ $rule != /* ]] || rule=$HF_ENDPOINT$rule
  [[ -z $NETWORK_GROUP ]] || rule=http://${HF_NETWORK_GROUP_PREFIX:-}replica-SLOT:$PORT
  reason=$(mktemp) at_end=role=replica
  for ((slot = 1; slot <= REPLICAS; slot++)); do
    until replica[slot]=$(running_or_new "$slot" 2>"$reason"); do
      tail -4 "$reason" >&2
      ! grep -qE '\b40[0-4] [A-Z]' "$reason" || die "replica $slot is refused for the reason above"
      ((SECONDS < deadline)) || die "replica $slot is not accepted in $START_MINUTES minutes"
      interruptible sleep "$POLL_S"
    done
    url=${rule/ID/${replica[slot]}}
    say "replica $slot: Job ${replica[slot]}, ${url/SLOT/$slot}"
    REPLICA_URLS=${REPLICA_URLS:+$REPLICA_URLS,}${url/SLOT/$slot}
  done
}

running_or_new() { # the id of slot $1's Job. Each try looks first, so no slot is started twice
  ids=$(run_jobs --label role=replica --label "slot=$1") || return
  if [[ -n $ids ]]; then echo "${ids%%$'\n'*}"; else SEED=$1 timeout 120 bash serve.sh; fi
}

look_at_replicas() { # says which have ended for good, after all attempts; $1 of them must be left
  local slot ended
  # Without an answer, the next look may bring one.
  ended=$(run_jobs --status completed,canceled,error,deleted --label role=replica 2>/dev/null) ||
    return 0
  for slot in "${!replica[@]}"; do
    [[ $ended == *"${replica[slot]}"* ]] || continue
    hf_jobs logs --tail 20 "${replica[slot]}" 2>/dev/null | sed "s/^/[replica $slot] /" || true
    say "replica $slot has ended; above is the end of its log: hf jobs logs ${replica[slot]}"
    unset "replica[slot]"
  done
  ((${#replica[@]} >= $1)) || die "${#replica[@]} replicas are left, $1 needed"
}

# ---- Before any GPU is asked for

check() { # what can be known before anything is paid for
  local name value active
  for name in REPLICAS MAX_STEPS LORA_RANK CONTEXT START_MINUTES MAX_STALENESS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ || $name=${!name} == MAX_STALENESS=0 ]] ||
      die "$name=${!name}: a whole number above 0 is needed"
  done
  [[ $RUN =~ ^[A-Za-z0-9_-]{1,100}$ ]] || die "RUN=$RUN: at most 100 letters, digits, - and _"
  # it checks the rank
  BUCKET=any/bucket SEED=1 DRY_RUN=1 bash serve.sh >/dev/null || exit 1
  # of train.py, where 5 * 1024 or 16_384 may stand
  for name in MAX_COMPLETION TOKEN_BUDGET; do
    value=$(sed -n "s/^$name = \([^#]*\).*/\1/p" train.py)
    [[ $value =~ ^[0-9_+*()\ ]+$ ]] ||
      die "train.py: $name = NUMBER is expected (digits, _, +, * and parentheses), found '$value'"
    printf -v "$name" %d $((${value//_/}))
  done
  ((MAX_COMPLETION < CONTEXT)) ||
    die "MAX_COMPLETION=$MAX_COMPLETION in train.py leaves no room for a prompt: CONTEXT=$CONTEXT"
  ((TOKEN_BUDGET == 0 || TOKEN_BUDGET >= CONTEXT)) ||
    die "TOKEN_BUDGET=$TOKEN_BUDGET in train.py is below CONTEXT=$CONTEXT: TRL would drop samples"
  [[ -n ${REPLICA_URLS:-} || $BUCKET =~ ^[^/[:space:]]+/[^/[:space:]]+$ ]] ||
    die "BUCKET='$BUCKET': user/name is expected, or REPLICA_URLS=http://... of replicas of yours"
  [[ -z $DRY_RUN && $action != @(trainer|docker) ]] || return 0
  active=$(run_jobs) || die "needed: pip install -U huggingface_hub, hf auth login, plan with Jobs"
  [[ -z $active ]] || die "run $RUN is going already: --attach or --stop it, or set another RUN"
}

# ---- The run

submit() { # sets id, the trainer's Job
  local dollars='see hf jobs hardware' free='' words slot
  [[ -z ${PRICE[$REPLICA_FLAVOR]:-} || -z ${PRICE[$TRAINER_FLAVOR]:-} ]] ||
    dollars="\$$((REPLICAS * PRICE[$REPLICA_FLAVOR] + PRICE[$TRAINER_FLAVOR])) per hour"
  [[ ${HF_ENDPOINT:-} != http://127.0.0.1:* ]] || free='local and free; on Hugging Face '
  say "$RUN: $MAX_STEPS steps, $REPLICAS x $REPLICA_FLAVOR + $TRAINER_FLAVOR ($free$dollars)"
  step timeout 120 hf buckets create "$BUCKET" --private --exist-ok --quiet |
    sed 's/^hf:/[launch] bucket &/' ||
    die "bucket $BUCKET is not there and cannot be made: is it yours, or your organisation's?"
  step mkdir -p ".local/code-$RUN"
  step cp train.py proxy.py serve.sh launch.sh requirements.txt ".local/code-$RUN"
  words=(
    hf jobs run --detach --quiet "${namespace[@]}"
    --flavor "$TRAINER_FLAVOR" --timeout "$TIMEOUT" --attempts "$ATTEMPTS"
    --label "run=$RUN" --label role=trainer
    --volume "hf://buckets/$BUCKET:$MOUNT" --volume "$CODE_VOLUME"
    # --env= before each setting
    --secrets HF_TOKEN "${settings[@]/#/--env=}"
    # the image's Python is the distribution's own
    --env PIP_BREAK_SYSTEM_PACKAGES=1
    ${NETWORK_GROUP:+--network-group "$RUN" --network-alias trainer}
    "$IMAGE" -- bash "$CODE_DIR/launch.sh" trainer
  )

  if [[ -n $DRY_RUN ]]; then
    step "${words[@]}"
    say "this Job then starts its replicas:"
    for ((slot = 1; slot <= REPLICAS; slot++)); do SEED=$slot bash serve.sh; done
    exit
  fi
  at_end=run=$RUN
  id=$(timeout 300 "${words[@]}") || die "the trainer's Job was refused, as hf says above"
  say "trainer: Job $id (RUN=$RUN ./launch.sh --attach follows it, --stop ends it)"
}

follow() { # the log of the trainer's Job $1 until it has ended; dies unless it completed
  local active tail=()
  [[ -n $1 ]] || die "no trainer's Job of run $RUN is known: hf jobs list --all"
  while true; do
    interruptible hf jobs logs --follow "${tail[@]}" "${namespace[@]}" "$1" 2>/dev/null || true
    active=$(run_jobs --label role=trainer 2>/dev/null) && [[ $active != *$1* ]] && break
    say "the log has stopped, the run may go on: trying again (RUN=$RUN ./launch.sh --attach)"
    tail=(--tail 5)
    interruptible sleep "$POLL_S"
  done
  at_end=run=$RUN
  hf_jobs wait "$1" >/dev/null || die "the trainer's Job did not complete: hf jobs logs $1"
  say "completed: scoreboard, checkpoints and adapter are in hf://buckets/$BUCKET/$RUN"
  [[ ! -f bench/report.py || ! -d $MOUNT/$RUN ]] || python3 bench/report.py "$MOUNT/$RUN" || true
}

main() {
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap '[[ $action == trainer ]] || at_end=""; exit 129' HUP # a closed terminal leaves the run
  case $action in
    run) check; submit; follow "$id" ;;
    detach) check; submit; at_end='' ;;
    attach) follow "$(run_jobs --all --label role=trainer | head -1)" ;;
    stop) cancel "run=$RUN" ;;
    check) check; exec bash bench/check.sh ;;
    trainer) check; trainer ;;
    serve) exec bash serve.sh "${@:2}" ;;
    # the trainer in a container here; variables go by name, so no value is in a list
    docker)
      check
      names=("${settings[@]%%=*}" HF_TOKEN VLLM_API_KEY REPLICA_URLS)
      step docker run --rm --gpus all --ipc host --network host --workdir "$PWD" \
        --volume "$MOUNT:$MOUNT:rslave" --volume "$PWD:$PWD" \
        --volume "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface" \
        "${names[@]/#/--env=}" --env PIP_BREAK_SYSTEM_PACKAGES=1 \
        --entrypoint bash "$IMAGE" launch.sh trainer
      ;;
  esac
}

main "$@"; exit # in one line: bash reads a script while it runs, and the file may change meanwhile
