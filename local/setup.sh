# shellcheck shell=bash disable=SC2034,SC2154 # launch.sh reads this file and has the functions and variables
# What `launch.sh --local` puts in place of a GPU and an account. LOCAL_BUCKETS is the directory that holds the buckets
# (user/name below it), LOCAL_READER_BUCKETS one that Jobs with a read-only volume see instead: a lagging mirror, mounts.

here=$PWD/.local buckets=${LOCAL_BUCKETS:-$PWD/.local/buckets}
RUN=${RUN:-local-$(date +%Y%m%d-%H%M%S)}
MAX_STEPS=${MAX_STEPS:-60} REPLICAS=${REPLICAS:-2} START_MINUTES=${START_MINUTES:-5} POLL_S=${POLL_S:-5}
MODEL=${MODEL:-$here/tiny/model} DATASET=${DATASET:-$here/tiny/sums}
EVAL_DATASET=${EVAL_DATASET-$here/tiny/held-out-sums}
BUCKET=local/lora MOUNT=$here/$RUN/lora CODE_DIR=$here/$RUN/code CODE_VOLUME=hf://buckets/local/$RUN-code:$CODE_DIR:ro
export HF_TOKEN=hf_local RANKS=${RANKS:-2} TRAIN_SCRIPT=${TRAIN_SCRIPT:-local/cpu_train.py} TRACKIO_DIR=$here/trackio
unset TRACKIO_SPACE_ID # the dashboard of a local run is on this machine
export HF_HUB_OFFLINE=0 # and so is its Hub: whoever works offline can run it, too
export JOBS_API_PASS="RANKS TRAIN_SCRIPT TRACKIO_DIR SAVE_STEPS HF_HUB_DISABLE_UPDATE_CHECK ${JOBS_API_PASS:-}"

start_local() { # everything that the run needs is installed, the small model made, the Jobs API answers
  local free line
  [[ -z $detach ]] || die "--local cannot be detached: its Jobs end with it"
  [[ -n $DRY_RUN ]] || bash local/install.sh
  # Only now, for bash remembers where it found a program; and without what could lead Python elsewhere.
  export PATH=$PWD/local:$here/venv/bin:$PATH
  unset PYTHONPATH PYTHONHOME
  hash -r
  [[ -z $DRY_RUN ]] || return 0
  free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1e6)}')
  ((free >= 1)) || die "the disk of $PWD has $free GB left: 1 is needed"

  port_is_free || die "port $PROXY_PORT is taken on this machine: set PROXY_PORT to a free one"
  mkdir -p "$buckets/local/$RUN-code"
  cp -r train.py proxy.py serve.sh launch.sh bench/check.sh requirements.txt local "$buckets/local/$RUN-code"
  # In a session of its own: Ctrl-C is for launch.sh alone, which cancels the Jobs and then ends the Jobs API.
  exec {announced}< <(exec setsid python3 local/jobs_api.py --with-parent --state "$here/$RUN" \
    --buckets "$buckets" ${LOCAL_READER_BUCKETS:+--reader-buckets "$LOCAL_READER_BUCKETS"} 2>"$here/$RUN.jobs.log")
  jobs_api=$!
  read -r -t 30 line <&"$announced" || die "local/jobs_api.py did not start: $(tail -3 "$here/$RUN.jobs.log")"
  export HF_ENDPOINT=${line#'[jobs] '}
  say "Jobs are processes of $HF_ENDPOINT, their logs are $here/$RUN/jobs/ID/log"
}

end_local() { # after a run with exit code $1; when the Jobs API ends, so do its Jobs
  local rest
  kill "$jobs_api" 2>/dev/null
  read -r -t 60 rest <&"$announced" # until the end of its output: all Jobs have ended
  if (($1 == 0)); then
    say "everything has ended; the bucket is $buckets/$BUCKET/$RUN"
  else
    say "everything has ended; the logs are $here/$RUN/jobs/*/log and $here/$RUN.jobs.log" >&2
  fi
}
