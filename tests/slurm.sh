#!/usr/bin/env bash
# `zdata build --engine slurm` under a real Slurm on this machine: slurmctld and three slurmd (Debian's slurm-wlm), with
# tasks killed, requeued, run twice and finished in any order. The store must have every byte of the one built here.
#
#   tests/slurm.sh [ZDATA]        exit 0 done, 1 failed, 77 no Slurm or no right to start one (needs root)
set -euo pipefail
cd "$(dirname "$0")/.."
zdata=$(realpath "${1:-target/debug/zdata}")
for program in slurmctld slurmd sbatch squeue scontrol; do
  command -v "$program" >/dev/null || { echo "no $program (apt-get install slurm-wlm)" >&2; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "slurmd needs root" >&2; exit 77; }

dir=$(mktemp -d)
pids=()
finish() {
  status=$?
  scancel --full --user=root 2>/dev/null || true
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  if [ "$status" = 0 ]; then rm -rf "$dir"; else tail -n 20 "$dir"/*.log >&2 || true; echo "kept $dir" >&2; fi
}
trap finish EXIT

# Ports of its own, so that it stands beside whatever runs here already.
port=$((20000 + $$ % 20000))
mkdir -p "$dir/state" "$dir"/spool-node{1,2,3}
cat >"$dir/slurm.conf" <<CONF
ClusterName=zstack
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
MinJobAge=300
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=1
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
MailProg=/bin/true
NodeName=node[1-3] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 3))] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf"
export SLURM_CONF="$dir/slurm.conf"
slurmctld -D -i >"$dir/ctld.out.log" 2>&1 &
pids+=($!)
for node in node1 node2 node3; do
  slurmd -D -N "$node" >"$dir/$node.out.log" 2>&1 &
  pids+=($!)
done
for _ in $(seq 60); do
  [ "$(sinfo -h -N -t idle 2>/dev/null | wc -l)" = 3 ] && break
  sleep 0.5
done
sinfo

# A corpus of twelve files, and its store as one process builds it.
mkdir "$dir/raw"
for file in $(seq 1 12); do
  seq "$file" 37 $((file * 6000 + 80000)) |
    sed 's/.*/{"id": "&", "text": "document & of a corpus, the square of & and & words in all"}/' >"$dir/raw/web-$(printf %02d "$file").jsonl"
done
cat >"$dir/corpus.toml" <<CORPUS
tokenizer = "tokenizer.json"
validation = "1/50"
unit = 1024
shard_tokens = 65536
[[source]]
name = "web"
files = ["raw/web-*.jsonl"]
id = "id"
CORPUS
"$zdata" tokenizer train "$dir/corpus.toml" --vocab 400 --out "$dir/tokenizer.json" >/dev/null
"$zdata" build "$dir/corpus.toml" --out "$dir/local"

# Under fire: whatever runs is requeued or killed for a while, the daemon's node is taken away once.
"$zdata" build "$dir/corpus.toml" --out "$dir/cluster" --engine slurm --task-bytes 1 --workers 1 >"$dir/build.log" 2>&1 &
build=$!
hits=0 round=0
while kill -0 "$build" 2>/dev/null && [ "$hits" -lt 6 ]; do
  sleep 0.05
  if [ $((round % 2)) = 0 ]; then
    task=$(squeue -h -t R -n zdata-tasks -o '%A' | head -1)
    [ -n "$task" ] && scontrol requeue "$task" 2>/dev/null || continue
  else
    pid=$(pgrep -f "$zdata task run --work $dir" | head -1) || continue
    kill -9 "$pid" 2>/dev/null || continue
  fi
  hits=$((hits + 1)) round=$((round + 1))
done
wait "$build" || echo "the first run ended early, as it may: $(tail -n 4 "$dir/build.log" | tr '\n' ' ')"
# What was killed left no part: the same command runs it again, and nothing else.
for _ in 1 2 3; do
  [ -e "$dir/cluster/manifest.json" ] && break
  "$zdata" build "$dir/corpus.toml" --out "$dir/cluster" --engine slurm --task-bytes 1 --workers 1
done
[ "$hits" -ge 4 ] || { echo "only $hits tasks were hit: make the corpus larger" >&2; exit 1; }
diff -r "$dir/local" "$dir/cluster"
echo "under fire ($hits hits): every byte as built here"

# Every task twice, backwards, as two arrays at once; then one merge.
tasks=$("$zdata" task plan "$dir/corpus.toml" --work "$dir/work" --task-bytes 1)
array=$(seq $((tasks - 1)) -1 0 | paste -sd,)
both=()
for _ in 1 2; do
  sbatch --wait --output="$dir/twice-%a.log" --open-mode=append --array="$array" \
    --wrap "exec $zdata task run --work $dir/work --index \$SLURM_ARRAY_TASK_ID --workers 1" >/dev/null &
  both+=($!)
done
wait "${both[@]}"
"$zdata" task merge --work "$dir/work" --out "$dir/twice"
diff -r "$dir/local" "$dir/twice"
again=$(cat "$dir"/twice-*.log | grep -c again)
[ "$again" = "$tasks" ] || { echo "$again of $tasks second results were compared"; exit 1; }
echo "each task twice, backwards: every byte as built here"

# An input that changed between the two: both results are kept, nothing is merged.
sed -i '1s/document/Document/' "$dir/raw/web-05.jsonl"
if sbatch --wait --output="$dir/other.log" --wrap "exec $zdata task run --work $dir/work --index 4" >/dev/null; then
  echo "another result was taken for the same" >&2
  exit 1
fi
grep -q "another result" "$dir/other.log"
ls "$dir"/work/*.conflict >/dev/null
if "$zdata" task merge --work "$dir/work" --out "$dir/never" 2>/dev/null; then exit 1; fi
echo "a second result with another digest: refused, both kept"
