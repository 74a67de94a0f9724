#!/usr/bin/env bash
# Installs Cotenant from wheels beside the packages of this machine's python3, and checks it on the GPU:
#
#   benchmarks/gpu/bootstrap.sh WHEELS OUT [arguments of python -m benchmarks.gpu]
#
# WHEELS is a folder filled by `python -m benchmarks.gpu.wheels`; results are written to OUT. Nothing is downloaded. The
# time that the installation takes counts towards --minutes-max.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
fi
wheels=$(realpath "$1") out=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv --system-site-packages --without-pip "$venv"
# python3 may itself be of a virtual environment, whose packages --system-site-packages does not show
python3 - "$venv" <<'PYTHON'
import pathlib, sys, sysconfig
own = next(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
(own / "outer.pth").write_text("".join(f"{path}\n" for path in sorted(paths)))
PYTHON
python3 -m pip --python "$venv/bin/python" install --quiet --no-index --no-deps --no-compile --ignore-installed \
  --disable-pip-version-check --no-cache-dir "$wheels"/*.whl
export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1
echo "installed in $SECONDS s"
status=0
python -m benchmarks.gpu --out "$out" --seconds-spent "$SECONDS" "$@" || status=$?
exit "$status"
