#!/usr/bin/env bash
# Make an environment for TRL, which `make peers` compares with this package: build/peers.
set -euo pipefail
cd "$(dirname "$0")/.."

version='1.16.*'
env=build/peers
stamp=$env/.ready
wanted=$(cat pyproject.toml constraints/cpu.txt tools/peers_env.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

"${PYTHON:-python3}" -m venv "$env"
echo "peers: installing TRL $version and this package into $env (minutes)"
torch=$(grep '^torch==' constraints/cpu.txt) # before the rest, which would bring the newest; transformers is TRL's choice
"$env/bin/pip" install --quiet "$torch"
"$env/bin/pip" install --quiet "$torch" "trl==$version" -e '.[torch]'
echo "$wanted" > "$stamp"
