# shellcheck shell=bash disable=SC2154 # launch.sh reads this file and has the functions and variables
# `launch.sh --check`, after the checks that need no Job: two cpu-basic Jobs and the bucket between them. A few minutes,
# under a cent. You should see that the exposed port of a Job asks for the token, and in how many seconds a directory
# that one Job publishes as TRL does is whole on the other's mount.

PROBES=5 PROBE_BYTES=4000000 # directories to publish, and what an adapter of the 1.5B model weighs

check() {
  local state url='' code='' deadline=$((SECONDS + START_MINUTES * 60)) reader writer probe
  prepare bench/check.sh
  probe=(hf jobs run --detach --quiet --flavor cpu-basic --timeout 20m --label "run=$RUN" --label role=probe
    --volume "$CODE_VOLUME" --env "DIRECTORY=$MOUNT/$RUN" --env "PORT=$PORT")
  reader=$(step "${probe[@]}" --volume "hf://buckets/$BUCKET:$MOUNT:ro" --expose "$PORT" python:3.12-slim -- \
    bash "$CODE_DIR/check.sh" read_probes)
  announce "reader: Job" "$reader"
  until [[ $code == 200 || -n $DRY_RUN ]]; do
    state=$(look "$reader") || state='UNKNOWN '
    [[ $state =~ ^(SCHEDULING|RUNNING|UNKNOWN) ]] || die "the reader has ended: hf jobs logs $reader"
    ((SECONDS < deadline)) || die "the exposed port never answered 200 with the token (last: ${code:-no URL})"
    url=${state#* }
    [[ -z $url ]] || code=$(status_of "$url" "$token")
    [[ $code == 200 ]] || attend sleep "$POLL_S"
  done
  if [[ -z $DRY_RUN ]]; then
    code=$(status_of "$url" '')
    [[ $code == 401 || $code == 403 ]] || die "$url answers $code without a token: anybody could change the engine"
    say "the exposed port answers 200 with the token and $code without"
  fi
  writer=$(step "${probe[@]}" --volume "hf://buckets/$BUCKET:$MOUNT" python:3.12-slim -- \
    bash "$CODE_DIR/check.sh" write_probes)
  announce "writer: Job" "$writer"
  [[ -n $DRY_RUN ]] || follow "$reader"
}

status_of() { ask "$1" "$2" --output /dev/null --write-out '%{http_code}' || true; }

write_probes() { # as TRL's save_lora_adapter: a directory beside, its files, one rename
  local i
  for i in $(seq "$PROBES"); do
    mkdir -p "$DIRECTORY/.policy-$i"
    head -c "$PROBE_BYTES" /dev/urandom >"$DIRECTORY/.policy-$i/adapter_model.safetensors"
    date +%s%3N >"$DIRECTORY/.policy-$i/adapter_config.json"
    mv "$DIRECTORY/.policy-$i" "$DIRECTORY/policy-$i"
    sleep 1
  done
}

read_probes() {
  local i policy ms deadline=$((SECONDS + 900))
  python3 -m http.server "$PORT" --directory "$(mktemp -d)" &
  for i in $(seq "$PROBES"); do
    policy=$DIRECTORY/policy-$i
    until [[ -s $policy/adapter_config.json &&
      $(stat -c %s "$policy/adapter_model.safetensors" 2>/dev/null) == "$PROBE_BYTES" ]]; do
      if ((SECONDS >= deadline)); then
        echo "[check] directory $i was not seen within 15 minutes: hf buckets ls, and the writer's log"
        exit 1
      fi
      sleep 0.1
    done
    ms=$(($(date +%s%3N) - $(<"$policy/adapter_config.json")))
    printf '[check] directory %d was whole on the other mount after %d.%03d s\n' "$i" $((ms / 1000)) $((ms % 1000))
  done
}

set -euo pipefail
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then "$1"; else check; fi # a probe's Job; launch.sh
