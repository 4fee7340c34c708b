#!/usr/bin/env bash
# `BUCKET=me/lora ./launch.sh --check`: checks the bucket and an exposed port with two cpu-basic Jobs,
# after launch.sh has checked the account. A few minutes, one cent. launch.sh sets the variables.
#
# You should see that the exposed port of a Job asks for the token; then, for each of PROBES
# directories that one Job publishes as TRL does, after how many seconds the other Job's mount shows
# all of it. Run alone, with one argument, it is what those Jobs run.
set -euo pipefail

PROBES=5            # directories that are published
PROBE_BYTES=4000000 # of the weights in each: what an adapter of the 1.5B model weighs

say() { echo "[check] $*"; }
die() {
  echo "[check] $*" >&2
  exit 1
}

write_probes() { # as TRL's save_lora_adapter: a temporary directory, its files, one rename
  for ((i = 1; i <= PROBES; i++)); do
    mkdir -p "$DIRECTORY/.policy-$i"
    head -c "$PROBE_BYTES" /dev/urandom >"$DIRECTORY/.policy-$i/adapter_model.safetensors"
    date +%s%3N >"$DIRECTORY/.policy-$i/adapter_config.json"
    mv "$DIRECTORY/.policy-$i" "$DIRECTORY/policy-$i"
    sleep 1
  done
}

read_probes() {
  local policy ms deadline=$((SECONDS + 900))
  python3 -m http.server "$PORT" --directory "$(mktemp -d)" &
  for ((i = 1; i <= PROBES; i++)); do
    policy=$DIRECTORY/policy-$i
    until [[ -s $policy/adapter_config.json &&
      $(stat -c %s "$policy/adapter_model.safetensors" 2>/dev/null) == "$PROBE_BYTES" ]]; do
      ((SECONDS < deadline)) || die "directory $i is not seen in 15 minutes: see the writer's log"
      sleep 0.1
    done
    ms=$(($(date +%s%3N) - $(<"$policy/adapter_config.json")))
    printf '[check] directory %d was whole on the other mount after %d.%03d s\n' \
      "$i" $((ms / 1000)) $((ms % 1000))
  done
}

if [[ ${1:-} == @(write|read)_probes ]]; then # inside a Job
  "$1"
  exit
fi

# ---- On your machine

: "${BUCKET:?is not set: start this as BUCKET=me/lora ./launch.sh --check}" "${CODE_DIR:?}"
label=run=check-$RUN
namespace=(${NAMESPACE:+--namespace "$NAMESPACE"})
DRY_RUN=${DRY_RUN:-}

step() { # runs a command; --dry-run prints it
  if [[ -z $DRY_RUN ]]; then timeout 120 "$@"; else printf '%q ' "$@" && echo; fi
}

probe() { # submits a Job that runs `check.sh $1`; prints its id
  local mode='' expose=()
  [[ $1 == write_probes ]] || mode=:ro expose=(--expose "$PORT")
  step hf jobs run --detach --quiet "${namespace[@]}" --flavor cpu-basic --timeout 20m \
    --label "$label" --label role=probe --volume "$CODE_VOLUME" \
    --volume "hf://buckets/$BUCKET:$MOUNT$mode" "${expose[@]}" \
    --env "DIRECTORY=$MOUNT/check-$RUN" --env "PORT=$PORT" \
    python:3.12-slim -- bash "$CODE_DIR/check.sh" "$1"
}

finish() {
  local code=$? id
  trap : INT TERM HUP
  rm -rf ".local/code-$RUN"
  for id in $(timeout 120 hf jobs list --quiet "${namespace[@]}" --label "$label"); do
    timeout 120 hf jobs cancel "${namespace[@]}" "$id" >/dev/null || code=1
  done
  exit "$code"
}

status() { # the HTTP status of URL $1 with token $2, which stdin brings: an argument list is public
  curl --silent --max-time 30 --output /dev/null --write-out '%{http_code}' --config - "$1" \
    <<<"${2:+header = \"Authorization: Bearer $2\"}" || true
}

say "Jobs on cpu-basic, and the bucket $BUCKET"
step hf buckets create "$BUCKET" --private --exist-ok --quiet
step mkdir -p ".local/code-$RUN"
step cp bench/check.sh ".local/code-$RUN"
if [[ -n $DRY_RUN ]]; then
  probe read_probes
  probe write_probes
  exit
fi

trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
token=${HF_TOKEN:-$(hf auth token)}
reader=$(probe read_probes)
say "reader: Job $reader"
url=${REPLICA_URL:-https://ID--$PORT.hf.jobs}
[[ $url != /* ]] || url=$HF_ENDPOINT$url
url=${url/ID/$reader}
until code=$(status "$url" "$token") && [[ $code == 200 ]]; do
  [[ -n $(timeout 120 hf jobs list --quiet "${namespace[@]}" --label "$label") ]] ||
    die "the reader has ended: hf jobs logs $reader"
  ((SECONDS < START_MINUTES * 60)) || die "$url never answers 200 with the token (last: $code)"
  sleep "$POLL_S"
done
code=$(status "$url" '')
[[ $code == 40[13] ]] || die "$url answers $code without a token: anybody could change the engine"
say "the exposed port answers 200 with the token and $code without"
say "writer: Job $(probe write_probes)"
hf jobs logs --follow "${namespace[@]}" "$reader" 2>/dev/null &
wait $!
timeout 120 hf jobs wait "${namespace[@]}" "$reader" >/dev/null ||
  die "the reader did not complete: hf jobs logs $reader"
