#!/bin/sh
# The story of trainer/docs/story.md, to the end: a corpus of which three documents are planted trouble -> train -> the odd step is found
# by itself -> explained -> what would have been without -> a fork that bans them -> it goes on -> both runs side by side.
# What it claims it checks. About a minute on two cores once it is built.
#
#   sh tests/story.sh [FOLDER OF zdata AND ztrain [FOLDER TO WORK IN [STEPS]]]
#
# Without a folder of programs they are built (release). STEPS (160): how long the run is, at least 140.
set -eu
cd "$(dirname "$0")/.."
. tests/built.sh
bin=${1:-} work=${2:-runs/story} steps=${3:-160}
say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }
zdata() { printf '$ zdata %s\n' "$*"; "$bin/zdata" "$@"; }
ztrain() { printf '$ ztrain %s\n' "$*"; "$bin/ztrain" "$@"; }
claim() { # claim "words" COMMAND...: ends the story where it does not hold
  words=$1
  shift
  if "$@"; then printf '  holds: %s\n' "$words"; else
    printf 'FAILED: %s\n' "$words" >&2
    exit 1
  fi
}

if [ -z "$bin" ]; then
  say "build the two programs"
  run cargo build --release --locked --bin zdata --bin ztrain
  bin=$(release_folder)
fi
rm -rf "$work" && mkdir -p "$work"
dependencies "$work/metadata.json"
cat >"$work/curriculum.toml" <<TOML
store = "store"
seed = 5
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
balance_lr = 1e-2
initializer_range = 0.1

[optimizer]
kind = "muon"
lr = 1e-2
weight_decay = 0.1
clip = 1.0

[schedule]
warmup_steps = 20
decay_steps = 300
final_lr = 1e-3

[[phase]]
name = "all"
steps = $steps
seq_len = 512
batch = 2
micro_batch = 1
mix = { web = 1, code = 1 }
TOML

say "plant: three documents of a bad crawl, one after the other, among text of this project's dependencies"
# Where they lie decides when they are read: tried until one late step reads all three, as a bad file would be.
planted="crawl-binary-dump crawl-loop crawl-shuffled-table"
read_at() { # the step that reads all three, if one does and it comes late enough; else nothing
  for id in $planted; do "$bin/zdata" where "$work/curriculum.toml" --doc "$id" --json; done | python3 -c '
import json, sys
found = [one for line in sys.stdin for one in json.loads(line)]
whole = all([at["tokens"] for at in one["seen"]] == [[0, one["tokens"]]] for one in found)
steps = {at["step"] for one in found for at in one["seen"]}
last = int(sys.argv[1])
if whole and len(steps) == 1 and 100 <= min(steps) <= last - 21:
    print(*steps)' "$steps"
}
step="" try=0
while [ -z "$step" ]; do
  try=$((try + 1))
  [ "$try" -le 100 ] || { echo "no place of a hundred is read as the story wants" >&2; exit 1; }
  python3 tests/story_corpus.py "$work" "$try" "$steps" <"$work/metadata.json"
  [ -e "$work/tokenizer.json" ] || zdata tokenizer train "$work/corpus.toml" --vocab 1024 --out "$work/tokenizer.json"
  rm -rf "$work/store"
  "$bin/zdata" build "$work/corpus.toml" --out "$work/store" --quiet >"$work/built" 2>&1
  step=$(read_at)
done
cat "$work/built"
for id in $planted; do grep -n "\"$id\"" "$work/web.jsonl" | cut -c 1-120; done

say "train"
ztrain --curriculum "$work/curriculum.toml" --out "$work/run" --checkpoint-every 20 --validate-every 0 --quiet

say "is anything odd?"
ztrain spikes --run "$work/run"
odd=$(oddest "$work/run")
claim "the oddest step, $odd, is the one that read the planted documents" [ "$odd" = "$step" ]

say "why?"
ztrain explain --run "$work/run" --step "$odd" --top 4
mkdir -p "$work/run/explained"
"$bin/ztrain" explain --run "$work/run" --step "$odd" --top 4 --json >"$work/run/explained/step-$odd.json"
first() {
  python3 -c '
import json, sys
print(*sorted(one["id"] for one in json.load(open(sys.argv[1]))["documents"][:3]))' "$work/run/explained/step-$odd.json"
}
claim "the three documents that are named first are the planted ones" [ "$(first)" = "$planted" ]

say "what would have been without them?"
drop=""
for id in $planted; do drop="$drop --drop-doc $id"; done
# shellcheck disable=SC2086
ztrain replay --run "$work/run" --step "$odd" $drop --continue 20 --plot "$work/whatif.svg"

say "ban them, and go on"
before=$((odd - 1))
# shellcheck disable=SC2086
ztrain fork "$work/run" --step "$before" --out "$work/calm" $drop
ztrain --curriculum "$work/calm/run.toml" --out "$work/calm" --checkpoint-every 20 --validate-every 0 --quiet
shared() { head -n "$odd" "$work/$1/ledger.jsonl" | sha256sum; }
claim "line 0 and steps 1 to $before of both ledgers are the same bytes" [ "$(shared run)" = "$(shared calm)" ]
claim "from then on they differ" [ "$(head -n $((odd + 1)) "$work/run/ledger.jsonl" | sha256sum)" != \
  "$(head -n $((odd + 1)) "$work/calm/ledger.jsonl" | sha256sum)" ]
banned() { for id in $planted; do "$bin/zdata" where "$work/calm/run.toml" --doc "$id" --json; done | python3 -c '
import json, sys
sys.exit(not all(at["banned"] for line in sys.stdin for one in json.loads(line) for at in one["seen"]))'; }
claim "the fork reads none of the three" banned
zdata verify-run "$work/calm"

say "the two runs, side by side"
code=0
ztrain compare "$work/run" "$work/calm" --plot "$work/both.svg" || code=$?
claim "compare says that they differ (exit 4)" [ "$code" = 4 ]
"$bin/ztrain" spikes --run "$work/calm" --json >"$work/calm-spikes"
claim "the fork has no odd step at $odd" sh -c "! grep -q '\"step\":$odd,' '$work/calm-spikes'"
ztrain report --run "$work/run" --run "$work/calm"
