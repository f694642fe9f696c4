#!/bin/sh
# How near `ztrain plan --cluster` comes to what a step takes here: measures this machine, plans a grid of shapes on 1 and 2
# ranks, and prints each part's planned seconds beside those that `ztrain bench step` measures, with the median error. About ten minutes
# on two idle cores; no part of the suite, since a busy machine changes between two measurements.
#
#   sh tests/sizing.sh [FOLDER OF zdata AND ztrain]
set -eu
cd "$(dirname "$0")/.."
. tests/built.sh
work=runs/sizing
bin=${1:-}
if [ -z "$bin" ]; then
  cargo build --release --locked --bin zdata --bin ztrain
  bin=$(release_folder)
fi
rm -rf "$work" && mkdir -p "$work"
dependencies "$work/metadata.json"
python3 tests/demo_corpus.py <"$work/metadata.json" >"$work/corpus.toml"
"$bin/zdata" tokenizer train "$work/corpus.toml" --vocab 2048 --out "$work/tokenizer.json"
"$bin/zdata" build "$work/corpus.toml" --out "$work/store"
python3 tests/sizing.py "$bin/ztrain" "$work" "${SECONDS_A_ROW:-0.1}"
