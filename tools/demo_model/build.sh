#!/bin/sh
# Builds the bundled demo model from nothing: tokenizer, training, export, evaluation.
#   tools/demo_model/build.sh [MINUTES] [SCRATCH FOLDER]
# Needs torch (CPU), mlx, mlx-lm and tokenizers in the environment; PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/../.."
minutes=${1:-83}
scratch=${2:-${TMPDIR:-/tmp}/phalanx-demo-model}
python=${PYTHON:-.venv/bin/python}
model=src/phalanx/demo/model

mkdir -p "$scratch"
"$python" -m tools.demo_model.tokenizer "$model"
"$python" -m tools.demo_model.train --tokenizer "$model" --out "$scratch" --minutes "$minutes"
"$python" -m tools.demo_model.export --checkpoint "$scratch/checkpoint.pt" --folder "$model" --bits 8
"$python" -m tools.demo_model.evaluate "$model" --checkpoint "$scratch/checkpoint.pt"
