#!/bin/sh
# Installs Cotenant on this machine, under systemd:  sudo sh deploy/install.sh [agent] [queue placement predictor contention]
# From a checkout, or COTENANT_PACKAGE=… for a wheel or a release. Run again to upgrade; running jobs run on.
set -eu
say() { printf '── %s\n' "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd)
prefix=${COTENANT_PREFIX:-/opt/cotenant}
units=${COTENANT_UNITS:-/etc/systemd/system}
etc=${COTENANT_ETC:-/etc/cotenant} extras=
[ $# -gt 0 ] || die "say what this machine is to run: agent, queue, placement, predictor or contention"
for part; do case $part in agent) extras=$extras,agent ;; queue | placement | predictor | contention) extras=$extras,server ;; *) die "there is no part '$part'" ;; esac; done
[ "$(id -u)" = 0 ] || die "this takes root: sudo sh $0 $*"
python=$(command -v python3) || die "there is no python3; on Debian: apt-get install python3-venv libgomp1"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer is needed"
missing=
"$python" -c 'import ensurepip' 2>/dev/null || missing=" python3-venv"
[ "$*" = agent ] || "$python" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null || missing="$missing libgomp1"
[ -z "$missing" ] || die "this machine lacks$missing; on Debian: apt-get install$missing"

say "program in $prefix"
"$python" -m venv "$prefix"
"$prefix/bin/pip" install --quiet --upgrade "${COTENANT_PACKAGE:-$here/..}[${extras#,}]"
[ -e /usr/local/bin/cotenant ] || ln -s "$prefix/bin/cotenant" /usr/local/bin/cotenant

say "settings in $etc"
id cotenant >/dev/null 2>&1 || useradd --system --home-dir /var/lib/cotenant --shell /usr/sbin/nologin cotenant
mkdir -p "$etc"
for file in cotenant.toml agent.toml environment; do
    [ -e "$etc/$file" ] || install -m 0640 -o root -g cotenant "$here/systemd/etc/$file" "$etc/$file"
done
# Parts on one machine share one token, though the agent's state belongs to root; with TLS it is not used.
install -d -m 0700 -o cotenant -g cotenant /var/lib/cotenant
[ -e /var/lib/cotenant/token ] || (umask 077; "$python" -c 'import secrets; print(secrets.token_urlsafe(32))' >/var/lib/cotenant/token)
chown cotenant:cotenant /var/lib/cotenant/token
install -d -m 0711 /var/lib/cotenant-agent
ln -sf ../cotenant/token /var/lib/cotenant-agent/token

say "units in $units"
for unit in "$here"/systemd/*.service; do
    sed "s|/opt/cotenant/|$prefix/|; s|/etc/cotenant/|$etc/|" "$unit" >"$units/${unit##*/}"
done
if ! [ -d /run/systemd/system ]; then say "systemd does not run here: start them yourself"; exit 0; fi
systemctl daemon-reload
for part; do
    case $part in agent) unit=cotenant-agent ;; *) unit=cotenant@$part ;; esac
    systemctl enable --quiet "$unit"
    systemctl restart "$unit" || die "$unit did not start: journalctl -u $unit"
    say "$unit: $(systemctl is-active "$unit")"
done
