#!/bin/sh
# Makes the virtual environment of this checkout; quick when it is up to date.
#
#   tools/setup.sh [DIRECTORY]      (default: .venv)
#
# PYTHON chooses the interpreter; else the first of python3.11, python3.12,
# python3.13 and python3 that is 3.11 to 3.13 and has venv. What is missing is
# named in one line with the command that installs it.
set -eu

cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp=$venv/.set-up

fail() {
  echo "set-up: $*" >&2
  exit 1
}

# Whether $1 runs, is a Python we support, and (with $2 = venv) has venv.
usable() {
  "$1" -c '
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
  sys.exit(1)
if sys.argv[1:] == ["venv"]:
  import ensurepip, venv
' ${2:+"$2"} >/dev/null 2>&1
}

find_python() {
  without_venv=
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if usable "$name" venv; then
      python=$name
      return
    fi
    if [ -z "$without_venv" ] && usable "$name"; then
      without_venv=$name
    fi
  done
  if [ -n "$without_venv" ]; then
    version=$("$without_venv" -c 'import sys
print("python%d.%d" % sys.version_info[:2])')
    fail "$without_venv has no venv: sudo apt-get install $version-venv"
  fi
  if [ -n "${PYTHON:-}" ]; then
    fail "PYTHON=$PYTHON is no Python 3.11 to 3.13 that runs:" \
      "sudo apt-get install python3.11 python3.11-venv, or name another"
  fi
  fail "no Python 3.11 to 3.13 found:" \
    "sudo apt-get install python3.11 python3.11-venv"
}

for tool in git make; do
  command -v "$tool" >/dev/null 2>&1 ||
    fail "$tool is missing: sudo apt-get install $tool"
done

# What the environment depends on; it is made anew when any of this changes.
wanted="$(cksum <pyproject.toml) ${PYTHON:-any} $(pwd)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] &&
  usable "$venv/bin/python"; then
  exit 0
fi

find_python
echo "set-up: $venv with $("$python" --version 2>&1)" \
  "(a few minutes the first time)"
rm -f "$stamp"
"$python" -m venv --clear "$venv" ||
  fail "$python could not make $venv, see above"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --editable '.[dev]' ||
  fail "the packages of pyproject.toml could not be installed into $venv," \
    "see above; the same command tries again"
echo "$wanted" >"$stamp"
