#!/usr/bin/env bash
# `launch.sh --local [OPTION]`: the same run on this machine, with no GPU and no account. Installs
# what is missing, then starts the stand-in for the Jobs API (local/jobs_api.py) around launch.sh.
# Every Job is a process here; Ctrl-C cancels them all, and none outlives the stand-in.
#
# About five minutes after a one-time installation of 3.5 GB; free. The constants below are yours:
# REPLICAS=3 MAX_STEPS=100 ./launch.sh --local. The bucket is .local/buckets/local/lora/RUN, the
# logs are .local/RUN/jobs/*/log. LOCAL_BUCKETS is another directory of buckets, and
# LOCAL_READER_BUCKETS is what read-only mounts show instead: a mirror that lags, a FUSE mount.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

here=$PWD/.local buckets=${LOCAL_BUCKETS:-$PWD/.local/buckets} options=()
for argument in "$@"; do
  [[ $argument == --local ]] || options+=("$argument")
done

export RUN=${RUN:-local-$(date +%Y%m%d-%H%M%S)}
export MAX_STEPS=${MAX_STEPS:-60} REPLICAS=${REPLICAS:-2} RANKS=${RANKS:-2}
export START_MINUTES=${START_MINUTES:-5} POLL_S=${POLL_S:-2}
export MODEL=${MODEL:-$here/tiny/model} DATASET=${DATASET:-$here/tiny/sums}
export EVAL_DATASET=${EVAL_DATASET-$here/tiny/held-out-sums}
export TRAIN_SCRIPT=${TRAIN_SCRIPT:-local/cpu_train.py}
export BUCKET=local/lora NAMESPACE='' MOUNT=$here/$RUN/lora
export CODE_DIR=$here/$RUN/code CODE_VOLUME=hf://buckets/local/$RUN-code:$here/$RUN/code:ro
export REPLICA_URL=/exposed/ID/8000 PORT=8000 NETWORK_GROUP=''
export HF_TOKEN=hf_local HF_HUB_OFFLINE=0 # the Hub is on this machine: it works offline, too
export TRACKIO_SPACE_ID='' TRACKIO_DIR=$here/trackio # and so is the dashboard
# The Jobs get these as well; they have no environment but launch.sh's list.
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore::FutureWarning,ignore::UserWarning
PYTHONWARNINGS+=:torch.distributed.fsdp._fully_shard._fsdp_state # what FSDP2 says on a CPU
export JOBS_API_PASS="TRACKIO_DIR SAVE_STEPS OMP_NUM_THREADS PYTHONWARNINGS ${JOBS_API_PASS:-}"

if [[ ${options[0]:-} == --dry-run ]]; then
  HF_ENDPOINT=http://127.0.0.1:0 exec ./launch.sh "${options[@]}"
elif [[ ${options[0]:-} == @(--detach|--attach|--stop) ]]; then
  echo "[local] ${options[0]}: a local run ends with its launcher, so there is nothing to leave" >&2
  exit 1
fi

bash local/install.sh
export PATH=$PWD/local:$here/venv/bin:$PATH
unset PYTHONPATH PYTHONHOME # what could lead Python elsewhere
free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1e6)}')
if ((free < 1)); then
  echo "[local] the disk of $PWD has $free GB left: 1 is needed" >&2
  exit 1
fi
mkdir -p "$buckets/local/$RUN-code"
cp -r train.py proxy.py serve.sh launch.sh bench/check.sh requirements.txt local \
  "$buckets/local/$RUN-code"
echo "[local] Jobs are processes of this machine, their logs are $here/$RUN/jobs/*/log"
echo "[local] the bucket is $buckets/$BUCKET"
exec python3 local/jobs_api.py --state "$here/$RUN" --buckets "$buckets" \
  --log "$here/$RUN.jobs.log" ${LOCAL_READER_BUCKETS:+--reader-buckets "$LOCAL_READER_BUCKETS"} \
  -- ./launch.sh "${options[@]}"
