#!/usr/bin/env bash
# One vLLM replica: serves the base model and, from the bucket, every policy that the trainer publishes.
#
#   ./serve.sh           as a Hugging Face Job on one H200 ($5 an hour); prints the Job's id alone
#   ./serve.sh docker    on a machine of yours with a GPU and the bucket mounted at $MOUNT
#   ./serve.sh here      in this container: becomes `vllm serve`
#
# It is up after one to three minutes (model download, CUDA graphs); `GET /health` answers 200 then.
# The flags and endpoints are those of vLLM 0.27.1: keep the pin.
#
# On machines of your own, mind the port: VLLM_SERVER_DEV_MODE opens endpoints that change the engine (/pause,
# /collective_rpc, ...), and vLLM's own token check (VLLM_API_KEY) guards little but /v1. So it listens on 127.0.0.1.
#   closed network   BIND=10.0.0.11 ./serve.sh docker: an address that only your machines can reach
#   open network     keep PORT closed; open HTTPS, where nginx asks for the token on every path:
#     location / { if ($http_authorization != "Bearer THE-KEY") { return 401; }
#                  proxy_pass http://127.0.0.1:8000; proxy_read_timeout 600s; client_max_body_size 64m; }
# The trainer: export VLLM_API_KEY=THE-KEY; REPLICA_URLS=https://gpu-1,https://gpu-2 ./launch.sh trainer. Its proxy
# sends that key with every request; where there is none it sends HF_TOKEN, which the exposed port of a Job asks for.
set -euo pipefail

IMAGE=${IMAGE:-vllm/vllm-openai:v0.27.1}
MODEL=${MODEL:-Qwen/Qwen2.5-Math-1.5B}
MAX_STALENESS=${MAX_STALENESS:-4} # versions a sample may lag behind the trainer
LORA_RANK=${LORA_RANK:-1}
CONTEXT=${CONTEXT:-4096}          # tokens: prompt + MAX_COMPLETION of train.py
SEED=${SEED:-0}                   # another one for each replica: TRL sends none, equal seeds draw equal rollouts
BUCKET=${BUCKET:-}                # user/name
MOUNT=${MOUNT:-/lora}             # the trainer publishes under this path, so every replica needs the same one
PORT=${PORT:-8000}
BIND=${BIND:-127.0.0.1}
RUN=${RUN:-run}
FLAVOR=${REPLICA_FLAVOR:-h200}
TIMEOUT=${TIMEOUT:-6h} # a Job's own deadline, should nobody be left to cancel it; the default is 30 minutes

bound=''
for rank in 512 320 256 128 64 32 16 8 1; do # what --max-lora-rank takes; the smallest that is enough
  ((rank < LORA_RANK)) || bound=$rank
done
if [[ -z $bound ]]; then
  echo "[serve] LORA_RANK=$LORA_RANK: vLLM takes at most 512" >&2
  exit 2
fi
mode=${1:-job}
[[ $mode != job ]] || BIND=0.0.0.0 # exposed ports, and other Jobs, reach only what listens on every interface

settings=(
  VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 # adapters are loaded while it serves
  VLLM_SERVER_DEV_MODE=1             # /server_info, /pause, /resume: TRL asks for all three
)
command=(
  vllm serve "$MODEL"
  --host "$BIND" --port "$PORT"
  --dtype bfloat16                     # as the trainer computes
  --max-model-len "$CONTEXT"
  --logprobs-mode processed_logprobs   # the PPO ratio's denominator is vLLM's own logprobs, after temperature
  --generation-config vllm             # the model card's sampling defaults must not reach the rollouts
  --enable-lora
  --max-lora-rank "$bound"
  --max-loras "$((MAX_STALENESS + 2))" # the live ones, and the next before the oldest goes; else vLLM evicts one in use
  --seed "$SEED"
)

case $mode in
  job)
    submit=(
      hf jobs run --detach --quiet
      --flavor "$FLAVOR"
      --timeout "$TIMEOUT"
      --label "run=$RUN" --label role=replica --label "slot=$SEED"
      --volume "hf://buckets/${BUCKET:?[serve] BUCKET=user/name is not set: it carries the adapters}:$MOUNT:ro"
    )
    if [[ -n ${NETWORK_GROUP:-} ]]; then # reached by alias from the group's Jobs alone, no exposed port
      submit+=(--network-group "$RUN" --network-alias "replica-$SEED")
    else
      submit+=(--expose "$PORT")
    fi
    # The image's entrypoint is not used in a Job: the command is spelled out.
    submit+=("${settings[@]/#/--env=}" "$IMAGE" -- "${command[@]}")
    if [[ -n ${DRY_RUN:-} ]]; then
      printf '%q ' "${submit[@]}" && printf '\n'
    else
      HF_HUB_DISABLE_UPDATE_CHECK=1 exec "${submit[@]}"
    fi
    ;;
  docker)
    if ! [[ -d $MOUNT ]]; then
      echo "[serve] $MOUNT is not a directory: mount the bucket there first (README: buckets)" >&2
      exit 2
    fi
    container=(docker run --rm --gpus all --ipc host --network host --volume "$MOUNT:$MOUNT:ro,rslave"
      "${settings[@]/#/--env=}")
    [[ -z ${VLLM_API_KEY:-} ]] || container+=(--env VLLM_API_KEY) # by name: the key is in no argument list
    exec "${container[@]}" --entrypoint "${command[0]}" "$IMAGE" "${command[@]:1}"
    ;;
  here) exec env "${settings[@]}" "${command[@]}" ;;
  *)
    echo "usage: serve.sh [job|docker|here]" >&2
    exit 2
    ;;
esac
