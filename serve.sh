#!/usr/bin/env bash
# One vLLM replica: serves the base model and, from the bucket, each policy the trainer publishes.
#
#   SEED=1 ./launch.sh serve          as a Hugging Face Job on one H200 ($5 per hour); prints its id
#   SEED=1 ./launch.sh serve docker   on a GPU machine of yours, with the bucket mounted at $MOUNT
#   SEED=1 ./launch.sh serve here     in this container: becomes `vllm serve`
#
# launch.sh sets the variables that both the trainer and its replicas need, then runs this file; run
# alone, it names the one that is missing. It is up after one to three minutes (model download, CUDA
# graphs): you should see `Application startup complete`, and GET /health answers 200.
# The flags are vLLM 0.27.1's: keep the pin.
#
# The port must not be open to the world: whoever reaches it can change the engine. On a machine of
# yours it listens on 127.0.0.1, or on BIND, an address that only your machines reach (README).
set -euo pipefail

mode=${1:-job}
missing="is not set: ./launch.sh serve $mode sets all but SEED and BUCKET"
: "${MODEL:?$missing}" "${LORA_RANK:?$missing}" "${MAX_STALENESS:?$missing}" "${CONTEXT:?$missing}"
: "${IMAGE:?$missing}" "${MOUNT:?$missing}" "${PORT:?$missing}"
: "${SEED:?is not set: a number that no other replica has, such as 1}"
host=${BIND:-127.0.0.1}
[[ $mode != job ]] || host=0.0.0.0 # an exposed port reaches only what listens on every interface

# what --max-lora-rank takes
for bound in 1 8 16 32 64 128 256 320 512; do
  ((bound < LORA_RANK)) || break
done
if ((bound < LORA_RANK)); then
  echo "[serve] LORA_RANK=$LORA_RANK: vLLM takes at most 512" >&2
  exit 2
fi

settings=(
  # adapters are loaded while it serves
  VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
  # /server_info, /reset_prefix_cache and others, for the proxy
  VLLM_SERVER_DEV_MODE=1
)
command=(
  vllm serve "$MODEL"
  --host "$host" --port "$PORT"
  # as the trainer computes
  --dtype bfloat16
  --max-model-len "$CONTEXT"
  # the PPO ratio divides by vLLM's probabilities: those it has sampled with
  --logprobs-mode processed_logprobs
  # not the model card's sampling defaults
  --generation-config vllm
  --enable-lora
  # the smallest that holds LORA_RANK
  --max-lora-rank "$bound"
  # MAX_STALENESS + 1 live policies, and the next one, which is loaded before the oldest is
  # unloaded: with less, vLLM evicts a policy that is in use
  --max-loras "$((MAX_STALENESS + 2))"
  # TRL sends no seed; equal ones would draw equal rollouts
  --seed "$SEED"
)

case $mode in
  job)
    words=(
      hf jobs run --detach --quiet ${NAMESPACE:+--namespace "$NAMESPACE"}
      --flavor "${REPLICA_FLAVOR:?$missing}"
      # in case nothing is left that could cancel it
      --timeout "${TIMEOUT:?$missing}"
      # one that fails starts again under its id: at its address
      --attempts "${ATTEMPTS:?$missing}"
      --label "run=${RUN:?$missing}" --label role=replica --label "slot=$SEED"
      --volume "hf://buckets/${BUCKET:?is not set: user/name}:$MOUNT:ro"
      # a gated or private model must download
      --secrets HF_TOKEN
      # --env= before each of them
      "${settings[@]/#/--env=}"
      ${NETWORK_GROUP:+--network-group "$RUN" --network-alias "replica-$SEED"}
    )
    [[ -n ${NETWORK_GROUP:-} ]] || words+=(--expose "$PORT")
    # all of it: a Job does not use the image's entrypoint
    words+=("$IMAGE" -- "${command[@]}")
    ;;
  docker)
    if ! [[ -d $MOUNT ]]; then
      echo "[serve] $MOUNT is not a directory: mount the bucket there first (README: buckets)" >&2
      exit 2
    fi
    words=(
      docker run --rm --gpus all --ipc host --network host
      # the trainer publishes paths below $MOUNT: the same here
      --volume "$MOUNT:$MOUNT:ro,rslave"
      --volume "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface"
      # by name: their values are in no argument list
      --env HF_TOKEN --env VLLM_API_KEY
      "${settings[@]/#/--env=}"
      --entrypoint "${command[0]}" "$IMAGE" "${command[@]:1}"
    )
    ;;
  here) words=(env "${settings[@]}" "${command[@]}") ;;
  *)
    echo "usage: serve.sh [job|docker|here]" >&2
    exit 2
    ;;
esac

[[ -n ${DRY_RUN:-} ]] || exec "${words[@]}"
printf '%q ' "${words[@]}"
echo
