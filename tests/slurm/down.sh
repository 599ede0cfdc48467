#!/usr/bin/env bash
# End what up.sh started, by the process numbers that it noted, and remove what it wrote outside its
# folder. Debian's packages stay.
set -uo pipefail
D=${SLURM_TEST_DIR:-/tmp/cluster-sft-slurm}
MARK='# written by tests/slurm/up.sh of cluster-sft'
unset SLURM_CONF
alive() {
  [ -r "/proc/$1/stat" ] && [ "$(sed 's/.*) //' "/proc/$1/stat" | cut -d' ' -f20)" = "$2" ] &&
    [ "$(sed 's/.*) //' "/proc/$1/stat" | cut -c1)" != Z ]
}
ours() { grep -qsF "$MARK" "$1"; }
if [ -s "$D/pids" ] && ours /etc/slurm/slurm.conf; then
  # The jobs first: what runs in them outlives the daemons.
  jobs=$(timeout 10 squeue -h -o %A 2>/dev/null)
  [ -z "$jobs" ] || timeout 10 scancel $jobs 2>/dev/null
  for _ in $(seq 150); do [ -z "$(timeout 10 squeue -h -o %A 2>/dev/null)" ] && break; sleep 0.1; done
  tac "$D/pids" | while read -r name pid start; do
    alive "$pid" "$start" || continue
    kill -TERM "$pid"
    for _ in $(seq 100); do alive "$pid" "$start" || break; sleep 0.1; done
    alive "$pid" "$start" && kill -KILL "$pid" # a slurmd without its controller may not listen
  done
fi
rm -f "$D/pids"
for f in /etc/slurm/slurm.conf /etc/slurm/gres.conf; do ours $f && rm -f $f; done
if ours /etc/hosts; then # in place: it may be a mount
  kept=$(grep -vF "$MARK" /etc/hosts)
  printf '%s\n' "$kept" >/etc/hosts
fi
echo "slurm: down" >&2
