#!/usr/bin/env bash
# Starts the ranks of one machine of several, as a pod of a JobSet does (trainer/deploy/jobset.yaml).
#
#   bash trainer/deploy/ranks.sh RANKS COMMAND...      RANKS ranks of COMMAND on this machine
#
# It reads NODES, the number of machines; JOB_COMPLETION_INDEX, this one's number from 0; MASTER_ADDR and MASTER_PORT, where the
# ranks meet on machine 0; POD_IP, this machine's address. Each rank gets the variables that torchrun sets, and SIGTERM.
#
# Exit code: 0 where all ranks end well; 1 to 5 where one of them ends so, which a restart does not change; 6 otherwise: start all
# again. After SIGTERM also a good end is 6, since a scheduler would take 0 for the end of the run.
set -euo pipefail
ranks=$1
shift
nodes=$NODES node=$JOB_COMPLETION_INDEX pids=() asked=''

# Other machines may know a better reason than 6: their code has to come first.
again() {
  sleep 10
  exit 6
}

stop() {
  asked=1
  [ ${#pids[@]} = 0 ] || kill -TERM "${pids[@]}" 2>/dev/null || true
}
trap stop TERM INT

if [ "$node" = 0 ]; then
  # Its own name may still lead to the pod before.
  MASTER_ADDR=${POD_IP:-$MASTER_ADDR}
else
  # A rank looks for the name once. A new pod has none for some seconds, and for some more it may lead to the pod before.
  for ((waited = 0; ; waited += 2)); do
    timeout 5 bash -c "</dev/tcp/$MASTER_ADDR/$MASTER_PORT" 2>/dev/null && break
    [ -z "$asked" ] && [ "$waited" -lt 1800 ] || { echo "no rank 0 at $MASTER_ADDR:$MASTER_PORT" >&2; again; }
    sleep 2
  done
fi

export MASTER_ADDR GROUP_RANK=$node WORLD_SIZE=$((nodes * ranks)) LOCAL_WORLD_SIZE=$ranks
for ((local = 0; local < ranks; local++)); do
  RANK=$((node * ranks + local)) LOCAL_RANK=$local "$@" &
  pids+=($!)
done
[ -z "$asked" ] || stop

# A rank that fails ends the others, at once or after --rank-timeout: nothing here cuts a checkpoint short.
worst=0 left=$ranks
while [ "$left" -gt 0 ]; do
  ended='' code=0
  wait -n -p ended "${pids[@]}" || code=$?
  # A signal has come: no rank ended.
  [ -n "${ended:-}" ] || continue
  left=$((left - 1))
  for one in "${!pids[@]}"; do [ "${pids[$one]}" != "$ended" ] || unset "pids[$one]"; done
  [ "$code" != 0 ] || continue
  # 101: a panic, a bug as 1 is.
  case $code in 101) code=1 ;; [1-5]) ;; *) code=6 ;; esac
  if [ "$worst" = 0 ] || [ "$worst" = 6 ]; then worst=$code; fi
done
case $worst in
0) [ -z "$asked" ] || again ;;
6) again ;;
*) exit "$worst" ;;
esac
