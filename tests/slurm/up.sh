#!/usr/bin/env bash
# Start a real Slurm of two nodes with pretend GPUs on this one machine, for tests/slurm/run.sh.
#   up.sh          install Debian's packages if they are missing, then start all; nothing if it is up
#   up.sh NODE     start that node's slurmd again
# Exit status 77: the packages cannot be had.
# Everything is on loopback. A Slurm that is not from here is left alone. down.sh ends it.
set -euo pipefail
D=${SLURM_TEST_DIR:-/tmp/cluster-sft-slurm}
NODES=(node1 node2)
PORT=${SLURM_TEST_PORT:-16917}
MARK='# written by tests/slurm/up.sh of cluster-sft'
CONF=/etc/slurm/slurm.conf # its default place: Snakemake takes SLURM_CONF away from jobs
unset SLURM_CONF
say() { echo "slurm: $*" >&2; }
die() { say "$*"; exit 1; }
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
alive() { [ -r "/proc/$1/stat" ] && [ "$(started "$1")" = "$2" ]; }
idle() { timeout 10 sinfo -h -N -p cpu -o %T 2>/dev/null | grep -cE '^(idle|mixed|allocated)$' || true; }

# Start a daemon in the foreground mode, so that $! is the daemon itself, and note its number and
# start time: together they name one process for ever.
launch() { # NAME COMMAND...
  local name=$1
  shift
  setsid "$@" >>"$D/log/$name.out" 2>&1 </dev/null 9>&- &
  local pid=$!
  for _ in $(seq 40); do [ -n "$(started $pid)" ] && break; sleep 0.05; done
  echo "$name $pid $(started $pid)" >>"$D/pids"
}

node() { # NAME: with a host name of its own, so that its jobs seem to run on another machine
  mkdir -p "$D/spool/$1"
  launch "slurmd.$1" unshare --uts sh -c 'hostname "$1"; exec slurmd -D -N "$1"' sh "$1"
}

[ "$(id -u)" = 0 ] || die "must run as root"
if [ $# = 1 ]; then
  node "$1"
  exit
fi
if [ -e $CONF ] && ! grep -qF "$MARK" $CONF; then
  die "$CONF is this machine's own: leaving it alone"
fi
mkdir -p "$D/log"
exec 9>"$D/lock"
flock 9
if [ -s "$D/pids" ]; then
  up=1
  while read -r _ pid start; do alive "$pid" "$start" || up=0; done <"$D/pids"
  if [ $up = 1 ] && [ "$(idle)" = ${#NODES[@]} ]; then
    say "already up"
    exit
  fi
  "$(dirname "$(readlink -f "$0")")/down.sh" 9>&-
fi

if ! command -v slurmctld slurmd sbatch munged >/dev/null; then
  say "installing Debian's slurmctld, slurmd, slurm-client and munge"
  policy=/usr/sbin/policy-rc.d # without it Debian starts what it installs
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy && made=1; }
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge; } >"$D/log/apt" 2>&1 9>&- || failed=1
  [ -z "${made:-}" ] || rm -f $policy
  [ -z "${failed:-}" ] || { tail -20 "$D/log/apt" >&2; say "apt-get failed"; exit 77; }
fi

rm -rf "$D/state" "$D/spool"
mkdir -p "$D/state" "$D/spool" "$D/dev" "$D/run" /etc/slurm
chmod 755 "$D" "$D/run"
[ -s "$D/munge.key" ] || (umask 077; head -c 1024 /dev/urandom >"$D/munge.key")
# Slurm takes devices alone as GPUs: copies of /dev/null.
for i in 0 1; do [ -c "$D/dev/gpu$i" ] || mknod -m 666 "$D/dev/gpu$i" c 1 3; done
{
  echo "$MARK"
  echo AutoDetect=off
  echo "NodeName=node[1-2] Name=gpu Type=pretend File=$D/dev/gpu[0-1]"
} >/etc/slurm/gres.conf
{
  cat <<END
$MARK
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$D/run/munge.sock
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=15
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,sched_interval=5,bf_interval=2
MinJobAge=3600
KillWait=10
OverTimeLimit=0
GresTypes=gpu
END
  for i in 1 2; do # they claim what profiles/slurm asks for
    echo "NodeName=node$i NodeHostname=node$i NodeAddr=127.0.0.1 Port=$((PORT + 10 + i))" \
      "CPUs=64 RealMemory=512000 Gres=gpu:pretend:2 State=UNKNOWN"
  done
  echo "PartitionName=cpu Nodes=node[1-2] Default=YES State=UP"
  echo "PartitionName=gpu Nodes=node[1-2] State=UP"
} >$CONF
for n in "${NODES[@]}"; do
  getent hosts "$n" >/dev/null || echo "127.0.0.1 $n $MARK" >>/etc/hosts
done

: >"$D/pids"
launch munged munged -F --socket="$D/run/munge.sock" --key-file="$D/munge.key" \
  --log-file="$D/log/munged.log" --pid-file="$D/run/munged.pid" --seed-file="$D/run/munged.seed"
for _ in $(seq 100); do munge -S "$D/run/munge.sock" -n >/dev/null 2>&1 && break; sleep 0.1; done
launch slurmctld slurmctld -D -c
for n in "${NODES[@]}"; do node "$n"; done
for _ in $(seq 300); do
  if [ "$(idle)" = ${#NODES[@]} ]; then
    say "up: $(slurmctld -V), ${NODES[*]}; logs in $D/log"
    exit
  fi
  sleep 0.2
done
tail -n 20 "$D"/log/* >&2
die "the nodes did not become idle within a minute"
