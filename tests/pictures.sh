#!/bin/sh
# The pictures of README.md and trainer/docs/metrics.md: the page of a run, of a small model on the demo's text, killed on the way,
# its oddest step explained; and the curves of the story (story.sh). About six minutes on two cores once it is built. Chromium is needed (tests/browser.py --install).
#
#   sh tests/pictures.sh [FOLDER OF zdata AND ztrain]
set -eu
cd "$(dirname "$0")/.."
. tests/built.sh
work=runs/pictures
bin=${1:-}
if [ -z "$bin" ]; then
  cargo build --release --locked --bin zdata --bin ztrain
  bin=$(release_folder)
fi
rm -rf "$work" && mkdir -p "$work"
dependencies "$work/metadata.json"
python3 tests/demo_corpus.py <"$work/metadata.json" >"$work/corpus.toml"
"$bin/zdata" tokenizer train "$work/corpus.toml" --vocab 512 --out "$work/tokenizer.json"
"$bin/zdata" build "$work/corpus.toml" --out "$work/store"
cat >"$work/small.toml" <<'TOML'
store = "store"
seed = 3
dtype = "f32"

[model]
preset = "zaya1-nano"
hidden_size = 32
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
moe_intermediate_size = 32
num_experts = 4
router_hidden_size = 16

[optimizer]
kind = "muon"
lr = 1e-2
weight_decay = 0.1
clip = 1.0

[schedule]
warmup_steps = 40
decay_steps = 1000
final_lr = 1e-3

[skip_step]
window = 64
sigma = 8.0

[[phase]]
name = "code"
steps = 700
seq_len = 64
batch = 8
micro_batch = 4
mix = { code = 6, prose = 3, manifests = 1 }

[[phase]]
name = "prose"
steps = 300
seq_len = 128
batch = 4
micro_batch = 2
mix = { code = 3, prose = 6, manifests = 1 }
TOML
train() { "$bin/ztrain" --curriculum "$work/small.toml" --out "$work/small" --quiet --checkpoint-every 50 --validate-every 50 --validation-sequences 8; }
train &
victim=$!
while kill -0 "$victim" 2>/dev/null && [ "$(wc -l 2>/dev/null <"$work/small/ledger.jsonl" || echo 0)" -lt 431 ]; do
  sleep 0.2
done
pkill -9 -P "$victim" 2>/dev/null || kill -9 "$victim"
wait "$victim" 2>/dev/null || true
train
"$bin/ztrain" spikes --run "$work/small"
step=$(oddest "$work/small")
mkdir -p "$work/small/explained" trainer/tools/src/report/pictures
"$bin/ztrain" explain --run "$work/small" --step "$step" --top 4 --json >"$work/small/explained/step-$step.json"
"$bin/ztrain" report --run "$work/small"
python3 tests/browser.py shoot "$work/small/report.html" "$work/pictures"
for name in light dark narrow-step; do
  cp "$work/pictures/report-$name.png" trainer/tools/src/report/pictures/
done
sh tests/story.sh "$bin"
cp runs/story/whatif.svg trainer/tools/src/report/pictures/
