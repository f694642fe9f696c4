#!/usr/bin/env bash
# One curriculum under every context and folded degree: the digest of each ledger, which has to be one.
#
#   tests/degrees.sh ZTRAIN CURRICULUM [EXTRA...]      ranks 1 to 8 as dp in {1, 2, 3} times cp and tsp in {1, 2, 4}, then a run that
#                                                      goes on under other degrees, one rank of which is killed
#
# The curriculum's phases need context_chunks that 8 divides, and weight_shards that 4 divides. Exit 0 where all ledgers are equal.
set -euo pipefail
ztrain=$1 curriculum=$2; shift 2
out=$(mktemp -d); trap 'rm -rf "$out"' EXIT
digest() { sha256sum <"$1/ledger.jsonl" | cut -c1-16; }
run() { # NAME RANKS DEGREE FLAGS...
  local name=$1 ranks=$2 degree=$3; shift 3
  local world=(); [ "$ranks" -gt 1 ] && world=(--nproc "$ranks")
  "$ztrain" --curriculum "$curriculum" --out "$out/$name" "${world[@]}" --cp "$degree" --workers 1 --validate-every 0 --quiet "$@" >/dev/null 2>"$out/said" ||
    { cat "$out/said" >&2; exit 1; }
}
run alone 1 1 "$@"
wanted=$(digest "$out/alone"); printf '%-26s %s\n' "dp 1 cp 1" "$wanted"
failed=0
tell() { # TEXT NAME
  local found; found=$(digest "$out/$2")
  [ "$found" = "$wanted" ] || failed=1
  printf '%-26s %s\n' "$1" "$found"
}
for degree in 1 2 4; do for data in 1 2 3; do
  ranks=$((degree * data)); [ "$ranks" -le 8 ] && [ "$ranks" -gt 1 ] || continue
  for reduce in whole bucketed; do
    name=$data-$degree-$reduce
    run "$name" "$ranks" "$degree" --grad-reduce "$reduce" "$@"
    tell "dp $data cp $degree $reduce" "$name"
  done
done; done
for folded in 2 4; do for degree in 1 2 4; do for data in 1 2 3; do
  ranks=$((folded * degree * data)); [ "$ranks" -le 8 ] || continue
  name=$data-$degree-$folded
  run "$name" "$ranks" "$degree" --tsp "$folded" "$@"
  tell "dp $data cp $degree tsp $folded" "$name"
done; done; done
run recomputed 4 4 --recompute "$@"; tell "dp 1 cp 4 recompute" recomputed
# Four ranks, one of them killed as soon as a step is recorded; then one alone, then two that share, until the end.
"$ztrain" --curriculum "$curriculum" --out "$out/killed" --nproc 4 --cp 2 --workers 1 --checkpoint-every 1 --validate-every 0 --quiet "$@" \
  >/dev/null 2>&1 &
launcher=$!
until [ "$(cat "$out/killed/ledger.jsonl" 2>/dev/null | wc -l)" -gt 2 ]; do
  sleep 0.05; kill -0 $launcher 2>/dev/null || break
done
pkill -KILL -n -P $launcher || true
wait $launcher || true
run killed 1 1 --stop-after "$(wc -l <"$out/killed/ledger.jsonl")" "$@"
run killed 2 2 "$@"; tell "killed, then cp 1, cp 2" killed
exit $failed
