#!/usr/bin/env bash
# The whole run: bucket, replicas, trainer Job, its log, the scoreboard; then everything is cancelled.
#
#   BUCKET=me/lora ./launch.sh      on Hugging Face Jobs: about an hour, $25 an hour with three replicas
#   ./launch.sh --local             the same files on this machine: no GPU, no account, about five minutes
#   ./launch.sh --check             is the ground firm? asks for no GPU (two cpu-basic Jobs, under a cent)
#   ./launch.sh --dry-run           prints the commands and the dollars an hour, submits nothing
#   ./launch.sh --detach            leaves the run once the trainer Job runs; closing the terminal leaves it, too
#   ./launch.sh --attach | --stop   follows, or ends, the run named RUN, from any machine
#   ./launch.sh trainer             the body of the trainer Job; with REPLICA_URLS on any GPU machine (see serve.sh)
#
# Ctrl-C cancels the Jobs. The trainer Job cancels the replicas itself when it ends, so a closed laptop costs nothing.
# The exit code is 0 only if the trainer completed.
# shellcheck disable=SC2329 # traps call some functions by name
set -euo pipefail

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 501)) || ! command -v timeout >/dev/null; then
  echo "[launch] bash 5.1 or newer (this is $BASH_VERSION) and timeout are needed: brew install bash coreutils" >&2
  exit 1
fi
cd "$(dirname "${BASH_SOURCE[0]}")"
cancel_at_end='' staged='' detach='' jobs_api='' # the last: the process that answers for the Jobs API, with --local
# shellcheck source=/dev/null
[[ " $* " != *" --local "* ]] || source local/setup.sh # what it sets goes before the defaults here

# What is asked for; the recipe's own constants are in train.py.
export BUCKET=${BUCKET:-} # user/name; made if it is not there
export RUN=${RUN:-}       # the run's directory in the bucket; the same name resumes (default: a new name)
export REPLICAS=${REPLICAS:-3}
export MODEL=${MODEL:-Qwen/Qwen2.5-Math-1.5B}
export DATASET=${DATASET:-sail/Sanity-Test-R1D-1.5B}
export EVAL_DATASET=${EVAL_DATASET-HuggingFaceH4/MATH-500} # empty for none
export MAX_STEPS=${MAX_STEPS:-500}
export MAX_STALENESS=${MAX_STALENESS:-4}  # serve.sh derives the adapter slots from it
export LORA_RANK=${LORA_RANK:-1}          # serve.sh derives the rank bound from it
export CONTEXT=${CONTEXT:-4096}           # tokens, prompt + completion
export MOUNT=${MOUNT:-/lora}              # where every Job sees the bucket
CODE_DIR=${CODE_DIR:-/code}               # where the trainer Job sees these scripts
CODE_VOLUME=${CODE_VOLUME:-}              # what brings them there (default: a staged copy, uploaded by `hf`)
export PORT=${PORT:-8000}                 # of a replica
export PROXY_PORT=${PROXY_PORT:-8000}     # in the trainer Job
export NETWORK_GROUP=${NETWORK_GROUP:-}   # 1: replicas are reached inside the Jobs' network, no exposed port
export IMAGE=${IMAGE:-vllm/vllm-openai:v0.27.1}
TRAINER_FLAVOR=${TRAINER_FLAVOR:-h200x2}
export REPLICA_FLAVOR=${REPLICA_FLAVOR:-h200}
declare -A PRICE=([h200]=5 [h200x2]=10)   # dollars an hour; `hf jobs hardware` has today's
export ATTEMPTS=${ATTEMPTS:-3}            # of the trainer Job: a preempted one resumes from its newest checkpoint
export TIMEOUT=${TIMEOUT:-6h}             # of each Job
export START_MINUTES=${START_MINUTES:-30} # until all replicas must answer
export POLL_S=${POLL_S:-10}               # seconds between two looks at the Jobs
export DRY_RUN=${DRY_RUN:-} HF_HUB_DISABLE_UPDATE_CHECK=1

say() { echo "[launch] $*"; }
die() { echo "[launch] $*" >&2; exit 1; }
attend() { "$@" & wait $!; } # gives way to a signal at once; without this, bash lets the command end first
hf() { timeout 120 hf "$@"; } # its requests have no deadline of their own; in timeout's process group, Ctrl-C does not
                              # reach it: a Job whose creation is cut short may exist without our knowing its id

step() { # runs a command; --dry-run prints it
  if [[ -z $DRY_RUN ]]; then "$@"; else printf '%q ' "$@" && printf '\n'; fi
}

announce() { # what was made, its id; in a dry run the id is the command that would have made it
  if [[ -z $DRY_RUN ]]; then say "$1 $2"; else echo "$2"; fi
}

# ---- Jobs. Their labels are the one record that is the same on every machine

replica=() # replica[slot] is a Job's id; slots are 1..REPLICAS, and a slot is its replica's seed, too
trainer='' # the trainer Job's id, in the launcher

listed() { hf jobs list --label "run=$RUN" "$@"; } # the run's active Jobs

look() { # at the Jobs with these ids: a line each, its stage and its first exposed URL
  hf jobs inspect --json "$@" | tr -d ' \n' | grep -o '"status":{[^}]*}' |
    sed -E 's/.*"stage":"([A-Z]*)"(.*"expose_urls":\["([^"]*)")?.*/\1 \3/'
}

look_at_jobs() { # sets: trainer_stage, replica_stages, urls (of the replicas that have one), ended (slots)
  local slot stage url lines
  lines=$(look ${trainer:+"$trainer"} "${replica[@]}") || return
  trainer_stage='' replica_stages='' urls=() ended=()
  {
    [[ -z $trainer ]] || read -r trainer_stage _
    for slot in "${!replica[@]}"; do
      read -r stage url || return
      [[ -z $NETWORK_GROUP ]] || url=http://${HF_NETWORK_GROUP_PREFIX:-}replica-$slot:$PORT
      replica_stages+=" $stage"
      case $stage in
        SCHEDULING | RUNNING) urls+=(${url:+"$url"}) ;;
        *) ended+=("$slot") ;;
      esac
    done
  } <<<"$lines"
}

require_replicas() { # none may have ended before the run begins
  local slot
  for slot in "${ended[@]}"; do
    hf jobs logs --tail 20 "${replica[slot]}" 2>/dev/null | sed "s/^/[replica $slot] /" || true
    die "replica $slot ended before the run began; above is the end of its log: hf jobs logs ${replica[slot]}"
  done
}

start_replica() {
  local id
  id=$(SEED=$1 timeout 120 bash serve.sh) || return
  replica[$1]=$id
  announce "replica $1: Job" "$id"
}

cancel() { # the run's active Jobs, or those with a label
  local ids='unknown' id asked='' deadline=$((SECONDS + 60))
  while ((SECONDS < deadline)); do
    if ids=$(listed --quiet "$@"); then
      [[ -n $ids ]] || return 0
      for id in $ids; do
        hf jobs cancel "$id" >/dev/null || continue
        [[ $asked == *$id* ]] || say "cancelled Job $id"
        asked+=" $id"
      done
    fi
    sleep 1
  done
  echo "[launch] not known to have ended: ${ids:-all Jobs}. Look with hf jobs list, end with hf jobs cancel ID" >&2
  return 1
}

# ---- inside the trainer Job, or on a machine whose owner names the replicas in REPLICA_URLS

run_trainer() {
  # Not local, for other functions read them: whether the replicas are Jobs of ours, which attempt this is (outside a
  # Job nobody tries again, so the first is the last), how many replicas it may replace, for each start costs money.
  managed=1 attempt=$ATTEMPTS spare=$((2 * REPLICAS))
  local output=$MOUNT/$RUN try slot deadline=$((SECONDS + START_MINUTES * 60)) health proxy torch which='' status
  [[ -z ${REPLICA_URLS:-} ]] || managed=''
  trap end_trainer EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  # What other libraries say at each start and is no news here, switched off by their own settings:
  export TRL_EXPERIMENTAL_SILENCE=1             # the pin is exact: its API may change, but not for us
  export PIP_DISABLE_PIP_VERSION_CHECK=1 TQDM_DISABLE=1
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # torchrun's own default, without its box of five lines
  export PYTHONWARNINGS="ignore::FutureWarning,ignore::UserWarning:torch.distributed.fsdp._fully_shard._fsdp_state"
  port_is_free || die "port $PROXY_PORT is taken on this machine: set PROXY_PORT to a free one"
  [[ -d $MOUNT ]] || die "MOUNT=$MOUNT is not there: mount the bucket first, read-write"
  mkdir -p "$output/.attempts" || die "$output refused a write: is the bucket mounted read-write, with space left?"
  if [[ -n ${JOB_ID:-} ]]; then # a file for each attempt of this Job: the last one must not leave replicas behind
    date >"$(mktemp "$output/.attempts/$JOB_ID.XXXXXX")"
    attempt=$(find "$output/.attempts" -name "$JOB_ID.*" | wc -l)
    say "attempt $attempt of $ATTEMPTS"
    export PIP_BREAK_SYSTEM_PACKAGES=1 # the image's Python is the distribution's, and the image is this Job's alone
  fi

  for try in 1 2 3; do
    attend python3 -m pip install --quiet --root-user-action ignore -r requirements.txt && break
    ((try < 3)) || die "pip failed: its error is above"
    attend sleep $((try * POLL_S))
  done

  if [[ -n $managed ]]; then
    adopt_replicas || die "the replicas' Jobs cannot be listed: the error of hf is above"
    for slot in $(seq "$REPLICAS"); do
      [[ -n ${replica[slot]:-} ]] || start_replica "$slot" || die "replica $slot was refused: the error of hf is above"
    done
    until look_at_jobs && require_replicas && ((${#urls[@]} == REPLICAS)); do
      ((SECONDS < deadline)) || die "no URLs of $REPLICAS replicas within $START_MINUTES minutes: hf jobs list"
      attend sleep "$POLL_S"
    done
    REPLICA_URLS=$(join "${urls[@]}")
  fi
  # Replicas on machines of your own should have a key of their own: the Hugging Face token is nothing to them.
  HF_TOKEN=${VLLM_API_KEY:-${HF_TOKEN:-}} REPLICA_URLS=$REPLICA_URLS python3 proxy.py &
  proxy=$!
  until health=$(ask_proxy health --fail); do
    kill -0 "$proxy" 2>/dev/null || die "proxy.py ended before the replicas were ready: its error is above"
    [[ -z $managed ]] || ! look_at_jobs || require_replicas
    ((SECONDS < deadline)) || die "the replicas are not ready after $START_MINUTES minutes: $(ask_proxy health)"
    attend sleep 2
  done
  say "the replicas are ready: $health"

  torchrun --nproc-per-node "${RANKS:-gpu}" "${TRAIN_SCRIPT:-train.py}" &
  torch=$!
  while [[ $which != "$torch" ]]; do
    sleep "$POLL_S" &
    status=0
    wait -n -p which "$torch" "$proxy" $! || status=$?
    case $which in
      "$torch") ((status == 0)) || die "train.py failed (exit $status): its error is above, checkpoints in $output" ;;
      "$proxy") die "proxy.py ended while train.py went on (exit $status): its error is above" ;;
      *) [[ -z $managed ]] || keep_replicas || true ;; # what fails here is tried again at the next look
    esac
  done
}

end_trainer() {
  local code=$? deadline=$((SECONDS + 40))
  trap - EXIT
  trap '' INT TERM HUP
  set +e # from here on everything is tried
  # shellcheck disable=SC2046
  kill $(jobs -p) 2>/dev/null
  if [[ -n $managed ]] && ((0 < code && code < 128 && attempt < ATTEMPTS)); then
    say "the replicas stay for the next attempt"
  elif [[ -n $managed ]]; then
    cancel --label role=replica
  fi
  while [[ -n $(jobs -rp) ]] && ((SECONDS < deadline)); do sleep 0.2; done
  # shellcheck disable=SC2046
  kill -KILL $(jobs -rp) 2>/dev/null
  exit "$code"
}

adopt_replicas() { # those that the launcher, or an earlier attempt, has started
  local jobs slot id
  jobs=$(listed --json --label role=replica) || return
  while read -r slot id; do
    replica[slot]=$id
  done < <(tr -d ' \n' <<<"$jobs" | grep -oE '"(slot|job_id)":"[^"]*"' | cut -d'"' -f4 | paste -d' ' - -)
}

keep_replicas() { # one that ended early is replaced, and the proxy is told
  local slot list
  look_at_jobs || return
  for slot in "${ended[@]}"; do
    if ((spare-- > 0)); then
      say "replica $slot ended early (hf jobs logs ${replica[slot]}): another one takes its place"
      start_replica "$slot"
    else
      say "replica $slot ended early (hf jobs logs ${replica[slot]}): $((2 * REPLICAS)) have been replaced, it is not"
      unset "replica[slot]"
    fi
  done
  ((${#replica[@]} > 0)) || die "no replica is left"
  list=$(join "${urls[@]}")
  if [[ -n $list && $list != "$REPLICA_URLS" ]]; then
    ask_proxy replicas --fail --output /dev/null --data "{\"urls\": [\"${list//,/\", \"}\"]}" && REPLICA_URLS=$list
  fi
}

join() { (IFS=, && echo "$*"); }
ask_proxy() { curl --silent --max-time 10 "http://127.0.0.1:$PROXY_PORT/$1" "${@:2}"; }
port_is_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$PROXY_PORT") 2>/dev/null; }

# ---- before any GPU is asked for

check_constants() { # what can be known without asking anybody
  local file name completion budget
  for file in train.py proxy.py serve.sh requirements.txt; do
    [[ -f $file ]] || die "$file is not beside launch.sh: copy all of the project's top-level files"
  done
  for name in REPLICAS MAX_STEPS LORA_RANK CONTEXT PORT PROXY_PORT ATTEMPTS START_MINUTES POLL_S; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: a whole number above 0 is needed"
  done
  [[ $MAX_STALENESS =~ ^[0-9]+$ ]] || die "MAX_STALENESS=$MAX_STALENESS: a whole number is needed"
  [[ $RUN =~ ^[A-Za-z0-9_-]{1,100}$ ]] || die "RUN=$RUN: a Job's label takes at most 100 letters, digits, - and _"
  [[ -z $NETWORK_GROUP || $RUN =~ ^[a-z0-9-]{1,46}$ ]] ||
    die "RUN=$RUN names the network group, too: at most 46 lower-case letters, digits and -"
  BUCKET=any/bucket DRY_RUN=1 bash serve.sh >/dev/null || exit 1 # it checks the rank
  completion=$(constant MAX_COMPLETION)
  budget=$(constant TOKEN_BUDGET)
  ((completion < CONTEXT)) || die "MAX_COMPLETION=$completion in train.py leaves no room for a prompt: CONTEXT=$CONTEXT"
  ((budget == 0 || budget >= CONTEXT)) ||
    die "TOKEN_BUDGET=$budget in train.py is below CONTEXT=$CONTEXT: TRL would drop the samples that do not fit"
}

constant() { sed -n "s/^$1 = \([0-9]*\).*/\1/p" train.py | grep . || die "train.py has no line '$1 = NUMBER'"; }

preflight() {
  local version who active
  [[ -z $DRY_RUN ]] || { BUCKET=${BUCKET:-USER/lora} && return; }
  type -P hf >/dev/null || die "the hf command is not there: pip install -U huggingface_hub"
  version=$(hf --version)
  [[ $(printf '%s\n' 2.4 "$version" | sort -V | head -1) == 2.4 ]] ||
    die "hf $version is too old, 2.4 or newer is needed: pip install -U huggingface_hub"
  token=${HF_TOKEN:-$(hf auth token 2>/dev/null)} || die "not logged in: hf auth login, or set HF_TOKEN"
  who=$(ask "${HF_ENDPOINT:-https://huggingface.co}/api/whoami-v2" "$token" --fail) ||
    die "Hugging Face does not know this token, or cannot be reached: hf auth whoami, hf auth login"
  [[ ! $who =~ \"role\":\ *\"read\" ]] || die "this token can only read: Jobs need one with the role write"
  [[ ! $who =~ \"role\":\ *\"fineGrained\" || $who == *job.write* ]] ||
    say "this fine-grained token does not name the permission job.write: Jobs may be refused"
  [[ $BUCKET =~ ^[^/[:space:]]+/[^/[:space:]]+$ ]] || die "set BUCKET=user/name, for example BUCKET=me/lora"
  active=$(listed --quiet) || die "Jobs cannot be listed, as hf says above: they need a Pro, Team or Enterprise plan"
  [[ -z $active ]] || die "run $RUN is going already: ./launch.sh --attach or --stop, or another RUN"
}

ask() { # URL $1 with token $2, which goes in on stdin: an argument list is public
  curl --silent --max-time 30 --config - "${@:3}" "$1" <<<"${2:+header = \"Authorization: Bearer $2\"}"
}

prepare() { # the bill, the bucket, and these files, which are all that the Jobs need, for $CODE_DIR
  local replica_price=${PRICE[$REPLICA_FLAVOR]:-} trainer_price=${PRICE[$TRAINER_FLAVOR]:-} hourly made
  hourly='see: hf jobs hardware'
  [[ -z $replica_price || -z $trainer_price ]] || hourly="\$$((REPLICAS * replica_price + trainer_price)) an hour"
  hourly="$REPLICAS replicas on $REPLICA_FLAVOR + trainer on $TRAINER_FLAVOR: $hourly"
  if [[ -z $jobs_api ]]; then
    say "$RUN: $MAX_STEPS steps, $hourly"
  else
    say "$RUN: $MAX_STEPS steps on this machine, free (on Jobs, $hourly)"
  fi
  made=$(step hf buckets create "$BUCKET" --private --exist-ok --quiet) ||
    die "the bucket $BUCKET is not there and cannot be made: is its first part you, or an organisation of yours?"
  announce bucket "$made"
  if [[ -z $CODE_VOLUME ]]; then
    staged=.local/code-$RUN
    step mkdir -p "$staged"
    step cp "$@" "$staged"
    CODE_VOLUME=./$staged:$CODE_DIR:ro
  fi
  cancel_at_end=1
}

# ---- the run

submit_trainer() { # prints the Job's id
  local name submit=(hf jobs run --detach --quiet --flavor "$TRAINER_FLAVOR" --timeout "$TIMEOUT"
    --attempts "$ATTEMPTS" --label "run=$RUN" --label role=trainer --secrets HF_TOKEN
    --volume "hf://buckets/$BUCKET:$MOUNT" --volume "$CODE_VOLUME")
  [[ -z $NETWORK_GROUP ]] || submit+=(--network-group "$RUN" --network-alias trainer)
  for name in RUN BUCKET MODEL DATASET EVAL_DATASET MAX_STEPS MAX_STALENESS LORA_RANK CONTEXT MOUNT REPLICAS PORT \
    PROXY_PORT NETWORK_GROUP IMAGE REPLICA_FLAVOR ATTEMPTS TIMEOUT START_MINUTES POLL_S TRACKIO_SPACE_ID; do
    [[ -z ${!name+set} || $name == TRACKIO_SPACE_ID && -z ${!name} ]] || submit+=(--env "$name=${!name}")
  done
  step "${submit[@]}" "$IMAGE" -- bash "$CODE_DIR/launch.sh" trainer
}

await_trainer() { # a progress line while the Jobs start
  local line='' now began=$SECONDS
  while ((SECONDS - began < START_MINUTES * 60)); do
    if look_at_jobs; then
      now="trainer $trainer_stage, replicas$replica_stages"
      [[ $now == "$line" ]] || say "after $((SECONDS - began)) s: $now"
      line=$now
      [[ $trainer_stage == SCHEDULING ]] || return 0
      require_replicas
    fi
    attend sleep "$POLL_S"
  done
  die "the trainer Job does not run after $START_MINUTES minutes"
}

follow() { # the log of Job $1 until it has ended; returns if it completed
  local stage tail=() lost=0
  while ((lost < 30)); do
    command hf jobs logs --follow "${tail[@]}" "$1" 2>/dev/null & # as long as it takes
    wait $! || true # it exits with 0 whatever the Job did
    stage=$(look "$1") || stage=UNKNOWN
    case ${stage%% *} in
      COMPLETED) return 0 ;;
      SCHEDULING | RUNNING) lost=0 ;;
      UNKNOWN) lost=$((lost + 1)) ;;
      *) die "Job $1 has ended: ${stage%% *}. Its log: hf jobs logs $1" ;;
    esac
    tail=(--tail 5)
    attend sleep "$POLL_S"
  done
  cancel_at_end=''
  die "lost sight of the Jobs, which go on: RUN=$RUN ./launch.sh --attach"
}

run() {
  local slot
  # The dashboard, a Space; set it empty for none. With --local it is on this machine.
  [[ -n $jobs_api ]] || export TRACKIO_SPACE_ID=${TRACKIO_SPACE_ID-${BUCKET%%/*}/async-grpo-lora}
  prepare train.py proxy.py serve.sh launch.sh requirements.txt
  for slot in $(seq "$REPLICAS"); do start_replica "$slot"; done
  trainer=$(submit_trainer)
  announce "trainer: Job" "$trainer"
  [[ -z $DRY_RUN ]] || return 0
  await_trainer
  if [[ -n $detach ]]; then
    cancel_at_end=''
    say "left running: RUN=$RUN ./launch.sh --attach follows it, --stop ends it"
  else
    follow "$trainer"
    say "completed: scoreboard, checkpoints and adapter are in hf://buckets/$BUCKET/$RUN"
  fi
}

attach() {
  local jobs
  jobs=$(listed --all --quiet --label role=trainer) # the newest first
  [[ -n $jobs ]] || die "no trainer Job of run $RUN: hf jobs list --all"
  follow "${jobs%%$'\n'*}"
}

end_launcher() { # whatever happened: nothing that was started here stays, unless it was told to
  local code=$?
  trap - EXIT
  trap '' INT TERM HUP
  set +e # from here on everything is tried
  # shellcheck disable=SC2046
  kill $(jobs -p) 2>/dev/null
  if [[ -z $DRY_RUN ]]; then
    [[ -z $staged ]] || rm -rf "$staged"
    [[ -z $cancel_at_end ]] || cancel || code=1
    [[ -z $jobs_api ]] || end_local "$code"
  fi
  exit "$code"
}

hang_up() { # the terminal is gone: the trainer Job, once there is one, sees to the rest
  [[ -z $trainer || -n $jobs_api ]] || cancel_at_end=''
  exit 129
}

main() {
  local argument action=run
  for argument in "$@"; do
    case $argument in
      --local) ;;
      --dry-run) DRY_RUN=1 ;;
      --detach) detach=1 ;;
      --attach | --stop | --check | trainer) action=${argument#--} ;;
      *)
        sed -n '2,/^# The exit/s/^# \{0,1\}//p' launch.sh >&2
        exit 2
        ;;
    esac
  done
  [[ -n $RUN || $action != @(attach|stop) ]] || die "which run? RUN=... ./launch.sh --$action"
  RUN=${RUN:-run-$(date +%Y%m%d-%H%M%S)}
  [[ $action != check ]] || RUN=check-$RUN
  [[ $action != @(run|check|trainer) ]] || check_constants
  if [[ $action != trainer ]]; then
    trap end_launcher EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap hang_up HUP
  fi
  [[ " $* " != *" --local "* ]] || start_local
  [[ $action != @(run|check) ]] || preflight
  # shellcheck source=/dev/null
  case $action in
    run) run ;;
    check) source bench/check.sh ;; # it runs
    attach) attach ;;
    stop) cancel ;;
    trainer) run_trainer ;;
  esac
}

main "$@"; exit # in one line: bash reads a script while it runs, and the file may change meanwhile
