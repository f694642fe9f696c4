#!/usr/bin/env bash
# The last phases of the recipe on a scaled-down model: 4,096, then 32,768, then 131,072 tokens in a sequence, documents packed by best
# fit, another base of the rotation at each length, reasoning trimmed so that its answer stays; by one rank, and by four that
# share each sequence (--cp 4). Both ledgers have to be one. About a quarter of an hour of two free cores, by its processor time, so it is not part of the tests.
#
#   tests/long.sh ZDATA ZTRAIN [FOLDER]        FOLDER keeps what was made: stores, runs, curve.svg
set -euo pipefail
zdata=$1 ztrain=$2 folder=${3:-$(mktemp -d)}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder" && cd "$folder"
if [ ! -e store/manifest.json ]; then
  python3 "$here/long_corpus.py" .
  "$zdata" tokenizer train corpus.toml --vocab 512 --out tokenizer.json
  "$zdata" build corpus.toml --out store
fi
cat >run.toml <<'TOML'
store = "store"
seed = 3
dtype = "f32"

[model]
preset = "zaya1-nano"
vocab_size = 512
hidden_size = 32
num_hidden_layers = 2
layers = ["cca", "linear"]
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
moe_intermediate_size = 32
num_experts = 4
router_hidden_size = 16
max_position_embeddings = 131072

[optimizer]
lr = 2e-3

[source.reasoning]
packing = "best-fit"
lengths = { 4096 = 1, 32768 = 2, 131072 = 6 }
max_epochs = 8

[source.notes]
packing = "best-fit"
lengths = { 4096 = 1, 32768 = 1, 131072 = 1 }
max_epochs = 8

[[phase]]
name = "4k"
steps = 3
seq_len = 4096
batch = 4
context_chunks = 8
mix = { reasoning = 0.5, notes = 0.5 }
model = { rope_theta = 1e4 }

[[phase]]
name = "32k"
steps = 2
seq_len = 32768
batch = 1
context_chunks = 8
mix = { reasoning = 0.8, notes = 0.2 }
model = { rope_theta = 1e6 }

[[phase]]
name = "131k"
steps = 5
seq_len = 131072
batch = 1
context_chunks = 8
mix = { reasoning = 1 }
model = { rope_theta = 5e6 }
TOML
"$zdata" plan run.toml
run() { # NAME FLAGS...
  local name=$1 start=$SECONDS; shift
  "$ztrain" --curriculum run.toml --out "$name" --validate-every 0 --recompute "$@"
  printf '%-8s %5d s   ledger %s\n' "$name" $((SECONDS - start)) "$(sha256sum <"$name/ledger.jsonl" | cut -c1-16)"
}
run alone --workers 1
run shared --nproc 4 --cp 4 --workers 1
"$ztrain" compare alone shared --plot curve.svg
cmp alone/ledger.jsonl shared/ledger.jsonl
echo "one ledger"
