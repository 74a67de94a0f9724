#!/bin/sh
# Puts Cotenant on this machine, under systemd:  sudo sh deploy/install.sh [agent] [queue placement predictor contention]
# From a checkout, or with COTENANT_PACKAGE=… naming a wheel or a release. Again: upgrades; running jobs run on.
set -eu
say() { printf '── %s\n' "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
prefix=${COTENANT_PREFIX:-/opt/cotenant}
units=${COTENANT_UNITS:-/etc/systemd/system}
etc=${COTENANT_ETC:-/etc/cotenant}
[ $# -gt 0 ] || die "say what this machine is to run: agent, queue, placement, predictor or contention"
for part; do case $part in agent | queue | placement | predictor | contention) ;; *) die "there is no part '$part'" ;; esac; done
[ "$(id -u)" = 0 ] || die "this takes root: sudo sh $0 $*"
python=$(command -v python3) || die "there is no python3; on Debian: apt-get install python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer is needed"

say "program in $prefix"
"$python" -m venv "$prefix" || die "no venv; on Debian: apt-get install python3-venv"
"$prefix/bin/pip" install --quiet --upgrade "${COTENANT_PACKAGE:-$here/..}"

say "settings in $etc"
id cotenant >/dev/null 2>&1 || useradd --system --home-dir /var/lib/cotenant --shell /usr/sbin/nologin cotenant
mkdir -p "$etc"
for file in cotenant.toml agent.toml environment; do
    [ -e "$etc/$file" ] || install -m 0640 -o root -g cotenant "$here/systemd/etc/$file" "$etc/$file"
done

say "units in $units"
install -m 0644 "$here"/systemd/*.service "$units/"
if ! [ -d /run/systemd/system ]; then say "systemd does not run here: start them yourself"; exit 0; fi
systemctl daemon-reload
for part; do
    case $part in agent) unit=cotenant-agent ;; *) unit=cotenant@$part ;; esac
    systemctl enable --quiet "$unit"
    systemctl restart "$unit"
    say "$unit: $(systemctl is-active "$unit")"
done
