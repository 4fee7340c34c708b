#!/usr/bin/env bash
# The whole run: bucket, replicas, trainer Job, its log, the scoreboard; then everything is cancelled.
#
#   BUCKET=me/lora ./launch.sh      on Hugging Face Jobs: about an hour, $25 an hour with three replicas
#   ./launch.sh --local             the same files on this machine: no GPU, no account, about five minutes
#   ./launch.sh --check             is the ground firm? asks for no GPU (two cpu-basic Jobs, under a cent)
#   ./launch.sh --dry-run           prints the commands and the dollars an hour, submits nothing
#   ./launch.sh --detach            starts the run and leaves it; so does closing the terminal
#   ./launch.sh --attach | --stop   follows, or ends, the run named RUN, from any machine
#   ./launch.sh trainer             the body of the trainer Job; with REPLICA_URLS on any GPU machine of yours
#
# Ctrl-C cancels the Jobs. The trainer Job cancels the replicas itself when it ends, so a closed laptop costs nothing.
# shellcheck disable=SC2329 # traps call some functions by name
set -euo pipefail

# What is asked for; the recipe's own constants are in train.py.
export BUCKET=${BUCKET:-} # user/name; made if it is not there
export RUN=${RUN:-}       # the run's directory in the bucket; the same name resumes (default: a new name)
export REPLICAS=${REPLICAS:-3}
export MODEL=${MODEL:-Qwen/Qwen2.5-Math-1.5B}
export DATASET=${DATASET:-sail/Sanity-Test-R1D-1.5B}
export EVAL_DATASET=${EVAL_DATASET-HuggingFaceH4/MATH-500}
export MAX_STEPS=${MAX_STEPS:-500}
export MAX_STALENESS=${MAX_STALENESS:-4} # serve.sh derives the adapter slots from it
export LORA_RANK=${LORA_RANK:-1}
export CONTEXT=${CONTEXT:-4096}          # tokens, prompt + completion
export MOUNT=${MOUNT:-/lora}             # where every Job sees the bucket
export CODE_DIR=${CODE_DIR:-/code}       # where the trainer Job sees these scripts
export CODE_VOLUME=${CODE_VOLUME:-}      # what brings them there (default: a staged copy, uploaded by `hf`)
export PORT=${PORT:-8000}                # of a replica
export PROXY_PORT=${PROXY_PORT:-8000}    # in the trainer Job
export NETWORK_GROUP=${NETWORK_GROUP:-}  # 1: replicas are reached inside the Jobs' network, no exposed port
export IMAGE=${IMAGE:-vllm/vllm-openai:v0.27.1}
PROBE_IMAGE=python:3.12-slim             # of --check
export TRAINER_FLAVOR=${TRAINER_FLAVOR:-h200x2} REPLICA_FLAVOR=${REPLICA_FLAVOR:-h200}
export ATTEMPTS=${ATTEMPTS:-3}           # of the trainer Job: a preempted one resumes from its newest checkpoint
export TIMEOUT=${TIMEOUT:-6h}            # of each Job
export START_MINUTES=${START_MINUTES:-30} # until all replicas must answer
export POLL_S=${POLL_S:-10}              # between two looks at the Jobs
export HF_HUB_DISABLE_UPDATE_CHECK=1
declare -A PRICE=([h200]=5 [h200x2]=10 [cpu-basic]=0.01) # dollars an hour; `hf jobs hardware` has today's

say() { echo "[launch] $*"; }
die() {
  echo "[launch] $*" >&2
  exit 1
}

# ---- Jobs, by label: the one record that is the same on every machine

active_jobs() { hf jobs list --quiet --label "run=$RUN" "$@"; } # ids of the active ones
stage() { hf jobs inspect --json "$1" | tr -d ' \n' | grep -o '"stage":"[A-Z]*"' | cut -d'"' -f4; }

urls_of() { # of Jobs with these ids, a line each
  hf jobs inspect --json "$@" | tr -d ' \n' | grep -o '"expose_urls":\["[^"]*"' | cut -d'"' -f4
}

replica_urls() { # of the active replicas, separated by commas
  local ids
  if [[ -n $NETWORK_GROUP ]]; then
    seq -s, -f "http://replica-%g:$PORT" "$REPLICAS"
    return
  fi
  ids=$(active_jobs --label role=replica) || return
  [[ -z $ids ]] && return
  # shellcheck disable=SC2086
  urls_of $ids | paste -sd,
}

start_missing_replicas() { # one in each slot 1..REPLICAS that has no active Job; the slot is its seed too
  local slot listed id
  listed=$(hf jobs list --json --label "run=$RUN" --label role=replica) || return
  for slot in $(seq "$REPLICAS"); do
    [[ $listed == *"\"slot\": \"$slot\""* ]] && continue
    id=$(SEED=$slot ./serve.sh)
    say "replica $slot: Job $id"
  done
}

cancel() { # all active Jobs of the run, or those with a label; asked three times, for this one must not fail
  local try ids id
  for try in 1 2 3; do
    if ids=$(active_jobs "$@"); then
      [[ -z $ids ]] && return
      for id in $ids; do
        hf jobs cancel "$id" >/dev/null && say "cancelled Job $id"
      done
    fi
    sleep "$try"
  done
  ids=$(active_jobs "$@") || ids="unknown"
  [[ -z $ids ]] || echo "[launch] still active: $ids. Cancel by hand: hf jobs cancel ID" >&2
}

# ---- inside the trainer Job

trainer() {
  cd "$CODE_DIR"
  export TRL_EXPERIMENTAL_SILENCE=1 # the pin is exact: that its API may change is no news
  # Not local: the trap reads them when this function is no more.
  output=$MOUNT/$RUN managed=1 proxy='' keeper='' torch='' attempt=1
  local try deadline active urls health status
  [[ -n ${REPLICA_URLS:-} ]] && managed=''
  mkdir -p "$output/.attempts"
  if [[ -n ${JOB_ID:-} ]]; then # a file for each attempt of this Job: the last one must not leave replicas behind
    date >"$output/.attempts/$JOB_ID.$(date +%s)"
    attempt=$(find "$output/.attempts" -name "$JOB_ID.*" | wc -l)
  fi
  end_trainer() {
    local code=$?
    trap - EXIT
    trap '' INT TERM HUP
    set +e
    # shellcheck disable=SC2046
    kill $(jobs_running "$proxy" "$keeper" "$torch") 2>/dev/null || true
    wait || true
    # After a success, a cancellation or the last attempt nobody needs the replicas; else the next attempt does.
    if [[ -n $managed ]] && ((code == 0 || code >= 128 || attempt >= ATTEMPTS)); then
      cancel --label role=replica
    fi
    exit "$code"
  }
  trap end_trainer EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP

  say "attempt $attempt of $ATTEMPTS: installing requirements.txt"
  for try in 1 2 3; do
    python3 -m pip install --quiet --disable-pip-version-check -r requirements.txt && break
    ((try < 3)) || die "requirements.txt could not be installed: pip's error is above"
    sleep $((try * 10))
  done

  if [[ -n $managed ]]; then
    start_missing_replicas
    deadline=$((SECONDS + START_MINUTES * 60))
    until urls=$(replica_urls) && (($(tr ',' '\n' <<<"$urls" | grep -c .) == REPLICAS)); do
      ((SECONDS < deadline)) || die "no URLs of $REPLICAS replicas within $START_MINUTES minutes: hf jobs list"
      sleep "$POLL_S"
    done
    export REPLICA_URLS=$urls
  fi
  python3 proxy.py &
  proxy=$!
  deadline=$((SECONDS + START_MINUTES * 60))
  until health=$(curl --silent --fail --max-time 10 "http://127.0.0.1:$PROXY_PORT/health"); do
    kill -0 "$proxy" 2>/dev/null || die "proxy.py ended before the replicas were ready: its error is above"
    if [[ -n $managed ]] && active=$(active_jobs --label role=replica) && (($(wc -w <<<"$active") < REPLICAS)); then
      die "a replica ended before it was ready. Its log: hf jobs logs ID, with an ID of" \
        "$(hf jobs list --all --quiet --label "run=$RUN" --label role=replica | paste -sd' ')"
    fi
    ((SECONDS < deadline)) || die "the replicas are not ready after $START_MINUTES minutes:" \
      "$(curl --silent --max-time 10 "http://127.0.0.1:$PROXY_PORT/health")"
    sleep 2
  done
  say "the proxy answers: $health"
  if [[ -n $managed ]]; then
    keep_replicas &
    keeper=$!
  fi
  torchrun --nproc-per-node "${RANKS:-gpu}" "${TRAIN_SCRIPT:-train.py}" &
  torch=$!
  status=0
  wait -n "$proxy" "$torch" || status=$?
  if kill -0 "$torch" 2>/dev/null; then
    die "proxy.py ended (exit $status) while training went on: its error is above"
  fi
  ((status == 0)) || die "train.py failed (exit $status): its error is above; everything up to the newest checkpoint" \
    "in $output is kept"
}

jobs_running() { # those of the given process ids that are set and alive
  local pid
  for pid in "$@"; do
    [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null && echo "$pid"
  done
}

keep_replicas() { # a replica that ended early is replaced, and the proxy is told; bounded, for each start costs money
  local known='' urls left=$((2 * REPLICAS)) started
  while sleep "$POLL_S"; do
    if ((left > 0)); then
      started=$(start_missing_replicas) || continue
      if [[ -n $started ]]; then
        echo "$started (replaces one that ended early)"
        left=$((left - $(wc -l <<<"$started")))
        ((left > 0)) || say "too many replicas have ended: no more are started"
      fi
    fi
    urls=$(replica_urls) || continue
    if [[ -n $urls && $urls != "$known" ]]; then
      curl --silent --fail --output /dev/null --max-time 10 "http://127.0.0.1:$PROXY_PORT/replicas" \
        --data "{\"urls\": [\"${urls//,/\", \"}\"]}" && known=$urls
    fi
  done
}

# ---- before any GPU is asked for

constant() { sed -n "s/^$1 = \([0-9]*\).*/\1/p" train.py; }

preflight() {
  local file version user budget completion
  ((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44)) || die "bash 4.4 or newer is needed, found $BASH_VERSION"
  for file in train.py proxy.py serve.sh requirements.txt; do
    [[ -f $file ]] || die "$file is not beside launch.sh: copy all of the project's top-level files"
  done
  command -v hf >/dev/null || die "the hf command is not there: pip install -U huggingface_hub"
  version=$(hf --version)
  [[ $(printf '%s\n' 1.31 "$version" | sort -V | head -1) == 1.31 ]] ||
    die "hf $version is too old, 1.31 or newer is needed: pip install -U huggingface_hub"
  user=$(hf auth whoami --format json 2>/dev/null | tr -d ' \n' | grep -o '"user":"[^"]*"' | cut -d'"' -f4) ||
    die "not logged in: hf auth login, or set HF_TOKEN"
  HF_TOKEN=${HF_TOKEN:-$(hf auth token --quiet)} # for --check's requests to the exposed port
  [[ $BUCKET =~ ^[^/[:space:]]+/[^/[:space:]]+$ ]] || die "set BUCKET=user/name, for example BUCKET=$user/lora"
  [[ $RUN =~ ^[A-Za-z0-9_-]{1,100}$ ]] || die "RUN=$RUN: a Job label takes letters, digits, - and _"
  [[ $REPLICAS =~ ^[1-9][0-9]*$ ]] || die "REPLICAS=$REPLICAS: at least one is needed"
  hf jobs list --limit 1 --quiet >/dev/null || die "this account cannot list Jobs: a Pro or Team plan, and a token" \
    "with job permissions (hf auth login)"
  budget=$(constant TOKEN_BUDGET) completion=$(constant MAX_COMPLETION)
  ((completion < CONTEXT)) || die "MAX_COMPLETION=$completion in train.py leaves no prompt in CONTEXT=$CONTEXT"
  ((budget == 0 || budget >= CONTEXT)) || die "TOKEN_BUDGET=$budget in train.py is below CONTEXT=$CONTEXT: TRL" \
    "would drop the samples that do not fit"
  MAX_STALENESS=$MAX_STALENESS DRY_RUN=1 ./serve.sh >/dev/null
  hf buckets create "$BUCKET" --private --exist-ok --quiet >/dev/null ||
    die "the bucket $BUCKET is not there and cannot be made: is $user allowed to write to it?"
  [[ -z $(active_jobs) ]] || die "run $RUN is going already: ./launch.sh --attach or --stop, or another RUN"
}

bill() {
  local replica=${PRICE[$REPLICA_FLAVOR]:-} trainer=${PRICE[$TRAINER_FLAVOR]:-} hourly='see: hf jobs hardware'
  [[ -n $replica && -n $trainer ]] && hourly="\$$((REPLICAS * replica + trainer)) an hour"
  say "$RUN: $REPLICAS replicas on $REPLICA_FLAVOR + trainer on $TRAINER_FLAVOR, $MAX_STEPS steps: $hourly"
}

# ---- the run

submit_trainer() { # prints the Job's id alone
  local name submit=(hf jobs run --detach --quiet --flavor "$TRAINER_FLAVOR" --timeout "$TIMEOUT"
    --attempts "$ATTEMPTS" --label "run=$RUN" --label role=trainer --secrets HF_TOKEN
    --volume "hf://buckets/$BUCKET:$MOUNT" --volume "$CODE_VOLUME")
  [[ -n $NETWORK_GROUP ]] && submit+=(--network-group "$RUN" --network-alias trainer)
  for name in RUN BUCKET MODEL DATASET EVAL_DATASET MAX_STEPS MAX_STALENESS LORA_RANK CONTEXT MOUNT CODE_DIR REPLICAS \
    PORT PROXY_PORT NETWORK_GROUP IMAGE REPLICA_FLAVOR ATTEMPTS TIMEOUT START_MINUTES POLL_S TRACKIO_SPACE_ID; do
    [[ -n ${!name:-} ]] && submit+=(--env "$name=${!name}")
  done
  submit+=("$IMAGE" -- bash "$CODE_DIR/launch.sh" trainer)
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${submit[@]}"
    printf '\n'
  else
    "${submit[@]}"
  fi
}

stage_code() { # only what the Job needs goes up
  local directory
  [[ -n $CODE_VOLUME ]] && return
  directory=$(mktemp -d)
  cp train.py proxy.py serve.sh launch.sh requirements.txt "$directory"
  staged=$directory CODE_VOLUME="$directory:$CODE_DIR:ro"
}

await_start() { # a progress line while Jobs start; fails as soon as one has ended
  local trainer=$1 began=$SECONDS line='' seen all now id
  while :; do
    # shellcheck disable=SC2046
    all=$(hf jobs list --all --json --label "run=$RUN" | grep -o '"status": "[A-Z]*"' | sort | uniq -c | tr -s ' \n"' ' ')
    seen=${all//status: /}
    [[ $seen != "$line" ]] && say "Jobs after $((SECONDS - began)) s: $seen"
    line=$seen
    now=$(stage "$trainer") || now=UNKNOWN
    [[ $now == SCHEDULING || $now == UNKNOWN ]] || return 0
    for id in $(hf jobs list --quiet --status error --label "run=$RUN" --label role=replica); do
      die "replica Job $id ended before the trainer started: hf jobs logs $id"
    done
    ((SECONDS - began < START_MINUTES * 60)) || die "the trainer Job is not running after $START_MINUTES minutes"
    sleep "$POLL_S"
  done
}

follow() { # the trainer's log until it has ended; returns 0 if it completed
  local trainer=$1 tail=() lost=0 now
  while ((lost < 30)); do
    hf jobs logs --follow "${tail[@]}" "$trainer" &
    follower=$!
    wait "$follower" || true
    now=$(stage "$trainer") || now=UNKNOWN
    case $now in
      COMPLETED) return 0 ;;
      CANCELED | ERROR | DELETED)
        say "trainer Job $trainer: $now. Its log: hf jobs logs $trainer" >&2
        return 1
        ;;
      UNKNOWN) lost=$((lost + 1)) ;;
    esac
    tail=(--tail 5)
    sleep "$POLL_S"
  done
  keep=1
  die "lost sight of the Jobs; the run goes on: ./launch.sh --attach"
}

end_run() { # whatever happened: nothing that this script started stays, unless it was told to leave it
  local code=$?
  trap - EXIT
  trap '' INT TERM
  set +e # from here on everything is tried
  [[ -n ${follower:-} ]] && kill "$follower" 2>/dev/null
  [[ -n ${staged:-} ]] && rm -rf "$staged"
  [[ -n ${keep:-} ]] || cancel
  [[ -n ${jobs_api:-} ]] && end_local
  exit "$code"
}

run() {
  local trainer
  RUN=${RUN:-run-$(date +%Y%m%d-%H%M%S)}
  if [[ -n ${DRY_RUN:-} ]]; then
    CODE_VOLUME=${CODE_VOLUME:-./STAGED:$CODE_DIR:ro} BUCKET=${BUCKET:-USER/lora}
    echo "hf buckets create $BUCKET --private --exist-ok"
    local slot
    for slot in $(seq "$REPLICAS"); do SEED=$slot ./serve.sh; done
    submit_trainer
    bill
    return
  fi
  preflight
  bill
  trap end_run EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  [[ -n ${jobs_api:-} ]] || trap 'keep=1; exit 129' HUP
  stage_code
  start_missing_replicas
  trainer=$(submit_trainer)
  say "trainer: Job $trainer"
  if [[ -n ${detach:-} ]]; then
    keep=1
    say "left running: RUN=$RUN ./launch.sh --attach follows it, --stop ends it"
    return
  fi
  await_start "$trainer"
  follow "$trainer" || exit 1
}

attach() {
  local trainer
  trainer=$(hf jobs list --all --quiet --label "run=${RUN:?name the run: RUN=...}" --label role=trainer | head -1)
  [[ -n $trainer ]] || die "no trainer Job of run $RUN: hf jobs list --all"
  keep=1
  trap end_run EXIT
  follow "$trainer" || exit 1
}

# ---- --check: two small Jobs and the bucket between them

check() {
  local reader url code probe
  RUN=check-${RUN:-$(date +%Y%m%d-%H%M%S)}
  preflight
  bill
  trap end_run EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  stage_code
  probe=(hf jobs run --detach --quiet --flavor cpu-basic --timeout 10m --label "run=$RUN" --label role=probe
    --env "RUN=$RUN" --env "MOUNT=$MOUNT" --env "PORT=$PORT" --env "CODE_DIR=$CODE_DIR" --volume "$CODE_VOLUME")
  reader=$("${probe[@]}" --volume "hf://buckets/$BUCKET:$MOUNT:ro" --expose "$PORT" "$PROBE_IMAGE" -- \
    bash "$CODE_DIR/launch.sh" probe-reader)
  "${probe[@]}" --volume "hf://buckets/$BUCKET:$MOUNT" "$PROBE_IMAGE" -- bash "$CODE_DIR/launch.sh" probe-writer >/dev/null
  say "two cpu-basic Jobs started: one publishes directories as TRL does, the other looks for them"
  until url=$(urls_of "$reader") && [[ -n $url ]] && code=$(answer_code "$url" "$HF_TOKEN") && [[ $code == 200 ]]; do
    [[ $(stage "$reader") =~ SCHEDULING|RUNNING ]] || die "the exposed port never answered 200 with the token" \
      "(last: ${code:-none}): hf jobs logs $reader"
    sleep "$POLL_S"
  done
  code=$(answer_code "$url" "")
  [[ $code == 401 || $code == 403 ]] || die "$url answers $code without a token: anybody could change the engine"
  say "the exposed port answers 200 with the token and $code without"
  follow "$reader" || exit 1
}

answer_code() { # HTTP status of URL $1 with token $2; the token goes in on stdin, not on the command line
  curl --silent --output /dev/null --max-time 10 --write-out '%{http_code}' --config - "$1" \
    <<<"${2:+header = \"Authorization: Bearer $2\"}"
}

PROBES=5 PROBE_BYTES=4000000 # directories to publish, and what an adapter of the 1.5B model weighs

probe_writer() { # as trl's save_lora_adapter: a directory beside, its files, one rename
  local i directory=$MOUNT/$RUN
  mkdir -p "$directory"
  for i in $(seq "$PROBES"); do
    mkdir "$directory/.policy-$i.tmp"
    head -c "$PROBE_BYTES" /dev/urandom >"$directory/.policy-$i.tmp/adapter_model.safetensors"
    date +%s%3N >"$directory/.policy-$i.tmp/adapter_config.json"
    mv "$directory/.policy-$i.tmp" "$directory/policy-$i"
    sleep 2
  done
}

probe_reader() {
  local i config weights empty deadline=$((SECONDS + 500))
  empty=$(mktemp -d)
  python3 -m http.server "$PORT" --directory "$empty" &
  trap 'kill %1' EXIT
  for i in $(seq "$PROBES"); do
    config=$MOUNT/$RUN/policy-$i/adapter_config.json weights=$MOUNT/$RUN/policy-$i/adapter_model.safetensors
    until [[ -s $config && $(stat -c %s "$weights" 2>/dev/null) == "$PROBE_BYTES" ]]; do
      ((SECONDS < deadline)) || die "policy-$i was not seen on this mount within 500 s"
      sleep 0.1
    done
    say "policy-$i seen whole after $(($(date +%s%3N) - $(cat "$config"))) ms"
  done
}

# ---- the same on one machine: local/ stands in for Hugging Face, the Jobs are processes

local_setup() {
  local here=$PWD/.local
  mkdir -p "$here"
  if ! [[ -f $here/venv/ready ]]; then
    say "making $here/venv: vLLM, torch and TRL for CPU, 3.5 GB, a few minutes"
    "${PYTHON:-python3}" -m venv "$here/venv"
    "$here/venv/bin/pip" install --quiet --disable-pip-version-check -r local/requirements.txt
    "$here/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    "$here/venv/bin/pip" install --quiet --disable-pip-version-check -r requirements.txt
    touch "$here/venv/ready"
  fi
  export PATH=$PWD/local:$here/venv/bin:$PATH
  [[ $action == install ]] && exit 0
  [[ -d $here/tiny ]] || python3 local/tiny_model.py "$here/tiny"
  RUN=${RUN:-local-$(date +%Y%m%d-%H%M%S)}
  MODEL=$here/tiny/model DATASET=$here/tiny/sums EVAL_DATASET=$here/tiny/held-out-sums
  BUCKET=local/lora MOUNT=$here/$RUN/lora CODE_DIR=$here/$RUN/code CODE_VOLUME=hf://buckets/local/$RUN-code:$here/$RUN/code:ro
  MAX_STEPS=${LOCAL_STEPS:-60} REPLICAS=${LOCAL_REPLICAS:-2} START_MINUTES=5 POLL_S=3
  export HF_TOKEN=hf_local RANKS=2 TRAIN_SCRIPT=local/cpu_train.py TRACKIO_DIR=$here/trackio
  export JOBS_API_PASS="RANKS TRAIN_SCRIPT TRACKIO_DIR SAVE_STEPS HF_HUB_DISABLE_UPDATE_CHECK"
}

start_local() { # the stand-in for the Jobs API; when it ends, so do its Jobs
  local here=$PWD/.local line
  mkdir -p "$here/buckets/local/$RUN-code"
  cp -r train.py proxy.py serve.sh launch.sh requirements.txt local "$here/buckets/local/$RUN-code"
  exec {announced}< <(exec python3 local/jobs_api.py --state "$here/$RUN" --buckets "$here/buckets" \
    ${LOCAL_READER_BUCKETS:+--reader-buckets "$LOCAL_READER_BUCKETS"} 2>"$here/$RUN.jobs.log")
  jobs_api=$!
  read -r -t 30 line <&"$announced" || die "local/jobs_api.py did not start: $(tail -3 "$here/$RUN.jobs.log")"
  export HF_ENDPOINT=${line#'[jobs] '}
  say "Jobs are processes of $HF_ENDPOINT, their logs in $here/$RUN/jobs/"
}

end_local() {
  kill "$jobs_api" 2>/dev/null
  local rest
  read -r -t 60 rest <&"$announced" || true # the end of its output: all its Jobs are gone
  say "everything has ended; the bucket is .local/buckets/$BUCKET/$RUN"
}

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

main() {
  local argument local='' action=run
  cd "$(dirname "${BASH_SOURCE[0]}")"
  detach='' jobs_api=''
  for argument in "$@"; do
    case $argument in
      --local) local=1 ;;
      --dry-run) export DRY_RUN=1 ;;
      --detach) detach=1 ;;
      --attach | --stop | --check | trainer | probe-writer | probe-reader) action=${argument#--} ;;
      --install) action=install ;;
      *) usage ;;
    esac
  done
  if [[ -n $local ]]; then
    [[ -z $detach ]] || die "--local cannot be detached: its Jobs end with it"
    local_setup
    [[ -n ${DRY_RUN:-} ]] || start_local
  fi
  case $action in
    run) run ;;
    attach) attach ;;
    stop) cancel ;;
    check) check ;;
    trainer) trainer ;;
    probe-writer) probe_writer ;;
    probe-reader) probe_reader ;;
  esac
}

main "$@"; exit # in one line: bash reads a script while it runs, and the file may change meanwhile
