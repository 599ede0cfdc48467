#!/usr/bin/env bash
# `make test-slurm`: the pipeline through profiles/slurm on a real Slurm that runs on this machine
# alone. Where that cannot be it says why and succeeds. It ends everything it started.
set -euo pipefail
cd "$(dirname "$0")/../.."
skip() {
  echo "test-slurm: skipped: $*"
  exit 0
}
[ "$(uname -s)" = Linux ] && command -v apt-get >/dev/null || skip "it installs Debian's Slurm, and this is no Debian"
[ "$(id -u)" = 0 ] || skip "it starts Slurm's daemons, which needs root"
unshare --uts true 2>/dev/null || skip "it gives each node a host name of its own, which this container forbids"
if [ -e /etc/slurm/slurm.conf ] && ! grep -q 'tests/slurm/up.sh' /etc/slurm/slurm.conf; then
  skip "this machine has a Slurm of its own"
fi
trap tests/slurm/down.sh EXIT
status=0
tests/slurm/up.sh || status=$?
[ $status != 77 ] || skip "Debian's packages of Slurm cannot be installed here"
[ $status = 0 ] || exit $status
timeout -k 30 "${SLURM_TEST_SECONDS:-1400}" python -m pytest tests/slurm/pipeline_checks.py -x -v --timeout 1200 "$@" || status=$?
echo "test-slurm: the jobs, as Slurm shows them"
timeout 10 squeue --states=all --sort=i --format='%.5i %.12T %.28k %.10P %.12N %.12M %r' || true
exit $status
