#!/bin/sh
# The main job on real input, to the end: text -> tokenizer -> store -> plan -> train (killed on the way, resumed)
# -> replay of a past step with the same bits. About six minutes on two cores once it is built.
set -eu
cd "$(dirname "$0")/.."
. tests/built.sh
demo=runs/demo
say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "build the two programs (the first time also fetches libtorch, once, 0.5 GB)"
run cargo build --release --locked --bin zdata --bin ztrain
bin=$(release_folder)
zdata() { printf '$ zdata %s\n' "$*"; "$bin/zdata" "$@"; }
ztrain() { printf '$ ztrain %s\n' "$*"; "$bin/ztrain" "$@"; }

say "raw text to store: the code, prose and manifests of this project's own dependencies"
rm -rf "$demo" && mkdir -p "$demo"
dependencies "$demo/metadata.json"
python3 tests/demo_corpus.py <"$demo/metadata.json" >"$demo/corpus.toml"
zdata tokenizer train "$demo/corpus.toml" --vocab 8192 --out "$demo/tokenizer.json"
zdata build "$demo/corpus.toml" --out "$demo/store"
zdata inspect "$demo/store"
zdata plan curricula/demo.toml

say "train, and pull the plug on the way (kill -9)"
steps() { # how many steps the ledger holds
  n=$(grep -c '"kind":"step"' "$demo/run/ledger.jsonl" 2>/dev/null) || true
  echo "${n:-0}"
}
printf '$ ztrain --curriculum curricula/demo.toml --out %s/run --device cpu --checkpoint-every 20 &\n' "$demo"
"$bin/ztrain" --curriculum curricula/demo.toml --out "$demo/run" --device cpu --checkpoint-every 20 &
victim=$!
while kill -0 "$victim" 2>/dev/null && [ "$(steps)" -lt 47 ]; do
  sleep 0.2
done
kill -9 "$victim" && echo "killed -9 after $(steps) steps"
wait "$victim" 2>/dev/null || true

say "the same command again: it goes on from the last checkpoint, and what it computes again must match the ledger"
ztrain --curriculum curricula/demo.toml --out "$demo/run" --device cpu --checkpoint-every 20

say "replay a past step: the same bits, and the documents behind its loss, worst first"
ztrain replay --run "$demo/run" --step 57
zdata verify-run "$demo/run"
