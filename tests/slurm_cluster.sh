# A real Slurm on this machine, for the scripts beside this: slurmctld and three slurmd (Debian's slurm-wlm). Each reads it in the
# project's folder, `. tests/slurm_cluster.sh`, and calls what it needs.

# install: Slurm, where that is possible (Debian, root); 0 it is there, 77 it is not.
install() {
  command -v slurmctld >/dev/null && { echo "Slurm is there: $(slurmctld -V)"; return 0; }
  [ "$(id -u)" = 0 ] || { echo "Slurm is not there, and only root installs it"; return 77; }
  command -v apt-get >/dev/null || { echo "Slurm is not there, and there is no apt-get"; return 77; }
  # Bounded, so that a machine without a network or with a busy package manager is not waited for.
  local get=(timeout 100 apt-get -qq -o DPkg::Lock::Timeout=30 -o Acquire::Retries=1 -o Acquire::http::Timeout=10)
  export DEBIAN_FRONTEND=noninteractive
  "${get[@]}" install -y --no-install-recommends slurm-wlm >/dev/null 2>&1 ||
    { "${get[@]}" update && "${get[@]}" install -y --no-install-recommends slurm-wlm; } >/dev/null 2>&1 ||
    { echo "Slurm is not there, and apt-get does not install slurm-wlm"; return 77; }
  echo "installed $(slurmctld -V)"
}

# start_cluster: in a folder of its own, $dir, with SLURM_CONF set; gone when the shell ends. Exit 77 where there is no Slurm or no
# right to start one.
start_cluster() {
  for program in slurmctld slurmd sbatch squeue scontrol; do
    command -v "$program" >/dev/null || { echo "no $program (apt-get install slurm-wlm)" >&2; exit 77; }
  done
  [ "$(id -u)" = 0 ] || { echo "slurmd needs root" >&2; exit 77; }

  dir=$(mktemp -d)
  pids=()
  finish() {
    status=$?
    scancel --full --user=root 2>/dev/null || true
    for _ in $(seq 50); do [ -n "$(squeue -h 2>/dev/null)" ] || break; sleep 0.1; done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    sleep 1
    for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    if [ "$status" = 0 ]; then rm -rf "$dir"; else tail -n 20 "$dir"/*.log >&2 || true; echo "kept $dir" >&2; fi
  }
  trap finish EXIT

  # Ports of its own, so that it stands beside whatever runs here already; Linux gives those from 32768 on to connections.
  port=$((20000 + $$ % 12000))
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
  for _ in $(seq 150); do
    [ "$(sinfo -h -N -t idle 2>/dev/null | wc -l)" = 3 ] && break
    sleep 0.2
  done
  sinfo -h
}

# submit ...: gives sbatch a script, and says the job's number.
submit() { sbatch --parsable --open-mode=append "$@"; }
