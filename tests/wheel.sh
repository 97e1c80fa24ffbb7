#!/usr/bin/env bash
# Builds the wheel, installs it into new environments, and uses it in empty folders, with an empty home.
#
#   tests/wheel.sh [PYTHON [PYTHON...]]     by default python3.11 python3.12 python3.13
#
# The first Python gets the extra `local`, and makes runs of the embedded engine; the others get no extra, and ask a fake server.
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
pythons=("${@:-python3.11}")
[ $# -gt 0 ] || pythons=(python3.11 python3.12 python3.13)
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT

# Runs a command in a folder of its own, with nothing of this shell's but the time zone's files and the compiler.
alone() {
  local environment=$1 folder
  shift
  folder=$(mktemp -d "$work/folder-XXXX")
  (cd "$folder" && env -i HOME="$folder/home" PATH="$environment/bin:/usr/bin:/bin" LANG=C.UTF-8 bash -euo pipefail -c "$*")
}

say() { echo "wheel: $(date +%T) $*"; }

git ls-files -z | xargs -0 cp --parents --no-dereference -t "$(mkdir -p "$work/source" && echo "$work/source")"
"${pythons[0]}" -m venv "$work/build"
"$work/build/bin/pip" wheel -q --no-deps -w "$work" "$work/source"
wheel=$(echo "$work"/rollfeed-*.whl)
say "$(basename "$wheel") $(du -k "$wheel" | cut -f1) kB"

install() { # ENVIRONMENT PYTHON EXTRAS
  "$2" -m venv "$1"
  "$1/bin/pip" install -q --disable-pip-version-check -c constraints.txt "$wheel$3"
  say "installed for $("$1/bin/python" --version)$3"
}

with_local() {
  local begun=$SECONDS
  alone "$1" 'rollfeed init dataset && rollfeed run dataset/run.toml --out first && rollfeed show first >shown && test -s shown'
  say "init and run took $((SECONDS - begun)) s"
  [ $((SECONDS - begun)) -lt 120 ]
  for template in environment agent; do
    alone "$1" "rollfeed init $template && cd $template && rollfeed run run.toml --quiet --out first && rollfeed lint first"
  done
  alone "$1" 'rollfeed init external-trainer && cd external-trainer && (python trainer.py runs/a >trained &
    rollfeed run run.toml --quiet --out runs/a --set rollout.num_rollout=2; wait %1 2>/dev/null || wait; cat trained)'
  "$1/bin/pip" install -q --disable-pip-version-check -c "$checkout/constraints.txt" mypy
  alone "$1" 'cat >own.py <<EOF && mypy --strict own.py
import rollfeed
from rollfeed.store import RunReader


def rewards(path: str) -> list[float]:
    with RunReader(path) as run:
        return [float(record.metrics["rollout/reward_mean"]) for record in run.steps()]


spec: rollfeed.RunSpec = rollfeed.RunSpec.load("run.toml")
EOF'
}

without_extras() {
  alone "$1" 'python -c "import rollfeed; print(rollfeed.__version__, rollfeed.RunSpec)"'
  alone "$1" 'rollfeed --help >help && grep -q "  init " help && rollfeed --version && rollfeed init --list && rollfeed graders >/dev/null'
  alone "$1" 'printf "response,label\n4,4\n5,4\n" >a.csv && rollfeed score a.csv --rm-type math --out b.jsonl && test "$(wc -l <b.jsonl)" = 2'
  alone "$1" 'rollfeed init servers && cd servers && rollfeed check run.toml
    rollfeed serve fake-sglang --vocab-size 40 --port 0 >server & trap "kill $!" EXIT
    until grep -q http server; do sleep 0.2; done
    rollfeed run run.toml --out runs/first --set "engine.sglang.workers=[\"$(grep -o "http.*" server)\"]"
    rollfeed show runs/first >/dev/null && rollfeed report runs/first --out page.html && rollfeed lint runs/first && rollfeed replay runs/first'
  # What is missing is one line with its command.
  alone "$1" 'rollfeed init dataset && ! rollfeed run dataset/run.toml 2>said && test "$(wc -l <said)" = 1 &&
    grep "pip install .rollfeed\[local\]" said'
}

install "$work/local" "${pythons[0]}" '[local]'
with_local "$work/local"
for each in "${pythons[@]:1}"; do
  "$each" --version >/dev/null 2>&1 || { say "left out: there is no $each"; continue; }
  install "$work/bare" "$each" ''
  without_extras "$work/bare"
  rm -rf "$work/bare"
done
say "all right"
