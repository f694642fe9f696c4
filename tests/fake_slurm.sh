#!/bin/sh
# sbatch, squeue and scontrol of a Slurm that runs every job at once, for tests/tasks.rs where there is no real one: called by
# links of these names, it keeps what became of the jobs in $FAKE_SLURM.
set -u
case "${0##*/}" in
squeue) sleep "${FAKE_SLURM_SLOW:-0}"; exit 0 ;;
scontrol) cat "$FAKE_SLURM"; exit 0 ;;
esac
tasks="" log=/dev/null
for word; do
  case "$word" in
  --output=*) log=${word#*=} ;;
  --array=*) tasks=$(echo "${word#*=}" | tr , '\n' | while IFS=- read -r a b; do seq "$a" "${b:-$a}"; done) ;;
  esac
  line=$word
done
: >"$FAKE_SLURM"
for task in ${tasks:-none}; do
  SLURM_ARRAY_TASK_ID=$task sh -c "$line" >>"$(echo "$log" | sed "s/%a/$task/")" 2>&1
  echo "JobId=7 ArrayTaskId=$task ExitCode=$?:0" >>"$FAKE_SLURM"
done
echo 7
