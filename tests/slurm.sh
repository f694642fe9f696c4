#!/usr/bin/env bash
# `zdata build --executor slurm` under a real Slurm on this machine: slurmctld and three slurmd (Debian's slurm-wlm), with
# tasks killed, requeued, run twice and finished in any order. The store must have every byte of the one built here.
#
#   tests/slurm.sh [ZDATA]        exit 0 done, 1 failed, 77 no Slurm or no right to start one (needs root)
#   tests/slurm.sh --install      installs Slurm where that is possible (Debian, root); exit 0 it is there, 77 it is not
set -euo pipefail
cd "$(dirname "$0")/.."

. tests/slurm_cluster.sh
if [ "${1:-}" = --install ]; then
  install
  exit
fi

zdata=$(realpath "${1:-target/debug/zdata}")
start_cluster

# Waits until jobs are over. A busy Slurm answers with an error at times, which says nothing about a job.
over() {
  local told
  while :; do
    if told=$(squeue -h -j "$(IFS=,; echo "$*")" 2>&1); then
      [ -n "$told" ] || break
    else
      case $told in *"Invalid job id"*) break ;; esac
    fi
    sleep 0.2
  done
}

# A corpus of ten files in two sources whose documents are compared, cleaned and trimmed; and its store as one process
# builds it. A document of each file stands in the next one, too.
mkdir "$dir/raw" "$dir/eval"
for file in $(seq 1 8); do
  seq $((file * 4000)) $((file * 4000 + 4000)) |
    sed 's/.*/{"id": "&", "text": "document & of a corpus,\\r\\n the square of & and & words and & in all"}/' >"$dir/raw/web-$file.jsonl"
done
for file in 1 2; do
  seq $((file * 5000)) $((file * 5000 + 600)) |
    sed 's/.*/{"q": "what is & and & more than & is", "a": "the sum of & and & and &"}/' >"$dir/raw/sums-$file.jsonl"
done
echo '{"text": "document 9007 of a corpus, the square of 9007 and 9007 words and"}' >"$dir/eval/set.jsonl"
cat >"$dir/corpus.toml" <<CORPUS
tokenizer = "tokenizer.json"
validation = "1/50"
unit = 1024
part_bytes = 1
[[source]]
name = "web"
files = ["raw/web-*.jsonl"]
id = "id"
[[source]]
name = "sums"
files = ["raw/sums-*.jsonl"]
template = "{q}\n{a}"
[[prepare]]
step = "clean"
[[prepare]]
step = "exact-duplicates"
[[prepare]]
step = "near-duplicates"
sources = ["sums"]
[[prepare]]
step = "decontaminate"
files = ["eval/*.jsonl"]
[[prepare]]
step = "length"
max_chars = 200
CORPUS
"$zdata" tokenizer train "$dir/corpus.toml" --vocab 300 --out "$dir/tokenizer.json" >/dev/null
"$zdata" build "$dir/corpus.toml" --out "$dir/local" 2>/dev/null
for list in "web/*/dropped.jsonl.zst" web/contaminated.jsonl; do
  cat "$dir"/local/$list | grep -q . || { echo "nothing in $list: the corpus tests too little" >&2; exit 1; }
done

# Under fire, in both stages of tasks: whatever runs is requeued or killed. What was killed left no part: the same command
# runs it again, and nothing else. A requeued job would wait for two minutes, which are not needed here.
build() { "$zdata" build "$dir/corpus.toml" --out "$1" --executor slurm --cache-dir "$dir/work" --workers 1; }
requeued=0 killed=0
hit() {
  if [ "$requeued" -le "$killed" ]; then
    task=$(squeue -h -t R -n zdata-scan,zdata-encode -o '%A' 2>/dev/null | head -1)
    [ -n "$task" ] && scontrol requeue "$task" 2>/dev/null && requeued=$((requeued + 1))
  else
    pid=$(pgrep -f "$zdata task (scan|run) --cache-dir $dir" | head -1)
    [ -n "$pid" ] && kill -9 "$pid" 2>/dev/null && killed=$((killed + 1))
  fi || true
}
enough() { [ "$requeued" -ge 2 ] && [ "$killed" -ge 2 ]; }
for _ in $(seq 12); do
  build "$dir/cluster" >"$dir/build.log" 2>&1 &
  build=$!
  while kill -0 "$build" 2>/dev/null; do
    [ $((requeued + killed)) -ge 6 ] || hit
    for task in $(squeue -h -t PD -o '%A %r' | awk '$2 == "BeginTime" {print $1}'); do
      scontrol update JobId="$task" StartTime=now 2>/dev/null || true
    done
    sleep 0.1
  done
  if wait "$build"; then
    # On a busy machine most tasks may have been over before they were looked for.
    if enough; then break; fi
    rm -rf "$dir/cluster" "$dir/work"
  else
    echo "this run ended early, as it may: $(tail -n 4 "$dir/build.log" | tr '\n' ' ')"
  fi
done
hits="$requeued requeued, $killed killed"
enough || { echo "only $hits: make the corpus larger" >&2; exit 1; }
diff -r "$dir/local" "$dir/cluster"
echo "under fire ($hits): every byte as built here"

# After an edit of one file: its two parts are made, the others are there.
sed -i '1s/document/Document/' "$dir/raw/web-5.jsonl"
"$zdata" build "$dir/corpus.toml" --out "$dir/local-edited" 2>/dev/null
build "$dir/edited" 2>"$dir/edited.log"
cat "$dir/edited.log"
[ "$(grep -c 'made 1 of 10 parts.* reused 9 parts' "$dir/edited.log")" = 2 ]
diff -r "$dir/local-edited" "$dir/edited"
echo "after an edit: every byte as built here"

# Every task twice, backwards, as two arrays at once; then one merge.
read -r plan tasks < <("$zdata" task plan "$dir/corpus.toml" --cache-dir "$dir/twice.tasks")
of="--cache-dir $dir/twice.tasks --plan $plan"
array=$(seq $((tasks - 1)) -1 0 | paste -sd,)
for verb in scan run; do
  both=()
  for _ in 1 2; do
    both+=("$(submit --output="$dir/twice-$verb-%a.log" --array="$array" \
      --wrap "exec $zdata task $verb $of --index \$SLURM_ARRAY_TASK_ID --workers 1")")
  done
  over "${both[@]}"
  results=$(cat "$dir/twice-$verb"-*.log | grep -cE '^[0-9a-f]{32}(  (again|reused))?$')
  [ "$results" = $((2 * tasks)) ] || { echo "$results results of $verb, not $((2 * tasks))"; exit 1; }
  [ "$verb" = run ] || "$zdata" task decide $of
done
"$zdata" task merge $of --out "$dir/twice"
diff -r "$dir/local-edited" "$dir/twice"
echo "each task twice, backwards: every byte as built here"

# An input that changed between the two: both results are kept, nothing is merged.
sed -i '1s/Document/dOcument/' "$dir/raw/web-5.jsonl"
over "$(submit --output="$dir/other.log" --wrap "exec $zdata task run $of --index 4")"
grep -q "another result" "$dir/other.log"
ls "$dir"/twice.tasks/plan-*/*.conflict >/dev/null
if "$zdata" task merge $of --out "$dir/never" 2>/dev/null; then exit 1; fi
echo "a second result with another digest: refused, both kept"
