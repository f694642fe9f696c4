#!/usr/bin/env bash
# `ztrain supervise` under a real Slurm on this machine (tests/slurm_cluster.sh): a job of two ranks on two of three nodes, one of
# which is killed. The rules give the job back to Slurm, without the node at fault; it must go on elsewhere, to the end, and leave
# the ledger of one rank that nothing befell.
#
#   tests/slurm_train.sh ZTRAIN CURRICULUM        exit 0 done, 1 failed, 77 no Slurm or no right to start one (needs root)
set -euo pipefail
ztrain=$(realpath "$1") curriculum=$(realpath "$2")
cd "$(dirname "$0")/.."
. tests/slurm_cluster.sh
start_cluster

"$ztrain" --curriculum "$curriculum" --out "$dir/alone" --nproc 1 --quiet
cat >"$dir/rules.toml" <<RULES
[[crash]]
do = "requeue"
times = 1
RULES
cat >"$dir/job.sh" <<JOB
#!/bin/sh
exec "$ztrain" supervise --launch "srun --kill-on-bad-exit=1" --rules "$dir/rules.toml" --curriculum "$curriculum" \\
  --out "$dir/run" --rank-timeout 20 --checkpoint-every 3
JOB
# The nodes' names stand for no machine of a network; ranks meet at this address.
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((port + 9))
export ZTRAIN_RUN_KEY="a key of this job alone $RANDOM$RANDOM" CUDA_VISIBLE_DEVICES=
job=$(submit --requeue -N2 -n2 --ntasks-per-node=1 --output="$dir/job.log" "$dir/job.sh")

lines() { cat "$dir/run/ledger.jsonl" 2>/dev/null | wc -l; }
state() { squeue -h -j "$job" -o %T 2>/dev/null; }
for _ in $(seq 600); do
  [ "$(lines)" -ge 4 ] && break
  [ -n "$(state)" ] || { cat "$dir/job.log"; echo "the job ended before it began" >&2; exit 1; }
  sleep 0.1
done

# The second rank is killed; its node is the one at fault.
node=
for pid in $(pgrep -f "$ztrain .*--out $dir/run"); do
  own=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null || true)
  if grep -qx SLURM_PROCID=1 <<<"$own" && [ "$(readlink "/proc/$pid/exe")" = "$ztrain" ]; then
    node=$(sed -n 's/^SLURMD_NODENAME=//p' <<<"$own")
    kill -9 "$pid"
  fi
done
[ -n "$node" ] || { echo "no process of rank 1" >&2; exit 1; }

# A job given back would wait for two minutes. A few seconds are needed: a node refuses what is started in the second (a
# credential's time has no fractions) in which it was told to kill that job, and Slurm then calls the job done.
for _ in $(seq 900); do
  [ -n "$(state)" ] || break
  if [ "$(squeue -h -j "$job" -o %T,%r)" = PENDING,BeginTime ]; then
    sleep 3
    scontrol update JobId="$job" StartTime=now 2>/dev/null || true
  fi
  sleep 0.1
done
cat "$dir/job.log"
told=$(scontrol show job "$job" | tr ' ' '\n')
grep -qx JobState=COMPLETED <<<"$told"
grep -qx Restarts=1 <<<"$told"
grep -qx "ExcNodeList=$node" <<<"$told" || { grep ExcNodeList <<<"$told" >&2; echo "wanted $node" >&2; exit 1; }
# Line 0 says which run it is, not what it trained on which bits; the rest is.
diff <(tail -n +2 "$dir/alone/ledger.jsonl") <(tail -n +2 "$dir/run/ledger.jsonl")
grep -q "\"action\":\"requeue\".*\"host\":\"$node\"\|\"host\":\"$node\".*\"action\":\"requeue\"" "$dir/run/events.jsonl" ||
  { grep supervisor "$dir/run/events.jsonl" >&2; exit 1; }
echo "rank 1 of $node killed, the job given back without it, the ledger that of one rank"
