#!/usr/bin/env bash
# Installs what a machine without a GPU needs, once: .local/venv (3.5 GB, about two minutes) and
# .local/tiny, the small model (half a minute). `launch.sh --local` and tests/run call it; where
# everything is there it returns at once. You should see the big packages as they come.
#
# A mark is set when a part is whole, and removed before the part is touched. Without its mark a
# part is made anew from nothing, because pip takes the half of an installation that was interrupted
# for the whole.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# pip and Python must not look elsewhere than here, whatever this shell is set up for.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

here=$PWD/.local log=$PWD/.local/install.log
say() { echo "[local] $*"; }
die() {
  echo "[local] $*" >&2
  exit 1
}

python=(setpriv --pdeathsig TERM "$here/venv/bin/python") # it ends when this program does

install_packages() {
  local system=${PYTHON:-python3} free
  "$system" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
    2>>"$log" || die "$system is not a Python 3.11 to 3.14 with venv: set PYTHON=... to one" \
    "(Debian: apt-get install python3-venv)"
  free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1e6)}')
  ((free >= 6)) || die "the disk of $PWD has $free GB left: 6 are needed"
  [[ ! -d $here/venv || -f $here/venv/ready ]] ||
    say "an installation was not finished: it is removed and begins again"
  [[ -f $here/venv/ready ]] || rm -rf "$here/venv"
  rm -f "$here/venv/ready"
  say "installing vLLM, torch and TRL for CPU in $here/venv: 3.5 GB, about two minutes"
  "$system" -m venv "$here/venv"
  pip install -r local/requirements.txt -r requirements.txt
  pip uninstall --yes torchvision torchaudio torchcodec # see local/requirements.txt
  cat local/requirements.txt requirements.txt >"$here/venv/ready"
  say "installed after $SECONDS s"
}

pip() { # with its own progress bars on a terminal; elsewhere a line for each part of 20 MB or more
  local status=0
  if [[ -t 1 ]]; then
    "${python[@]}" -m pip "$@" || status=$?
  else
    "${python[@]}" -m pip "$@" 2>&1 | tee -a "$log" | big_parts || status=$?
    ((status == 0)) || tail -15 "$log" >&2
  fi
  ((status == 0)) || die "pip failed, as it says above; the next start begins again"
}

big_parts() { # of what pip says
  local line
  while IFS= read -r line; do
    if [[ $line =~ ([^ /]+)\ \(([0-9]+)[0-9.]*\ ([MG])B\)$ ]]; then
      [[ ${BASH_REMATCH[3]} == M && ${BASH_REMATCH[2]} -lt 20 ]] || say "${BASH_REMATCH[0]}"
    elif [[ $line =~ ^Processing\ .*/(.*whl)$ ]]; then
      say "${BASH_REMATCH[1]}"
    elif [[ $line == Installing\ collected* ]]; then
      say "unpacking $(wc -w <<<"${line#*:}") packages"
    fi
  done
}

mkdir -p "$here"
exec 9>"$here/install.lock"
flock --nonblock 9 || {
  say "another installation is at work in $here: waiting for its end, half an hour at most"
  flock --timeout 1800 9 || die "it has not ended"
}
cat local/requirements.txt requirements.txt | cmp -s - "$here/venv/ready" || {
  : >"$log"
  install_packages
}
if ! cmp -s local/tiny_model.py "$here/tiny/made_by"; then
  say "making the small model in $here/tiny, about half a minute"
  "${python[@]}" local/tiny_model.py "$here/tiny"
  cp local/tiny_model.py "$here/tiny/made_by"
fi
