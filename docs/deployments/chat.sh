#!/usr/bin/env bash
# Serves the chat model on two GPUs.
set -euo pipefail

MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
ARGS=(
  --tensor-parallel-size 2
  --max-model-len 32K
)
exec vllm serve "$MODEL" "${ARGS[@]}" \
  --port "${PORT:-8000}" --served-model-name chat "$@"
