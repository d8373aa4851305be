#!/usr/bin/env bash
# An environment of its own for MindSpore, which needs numpy below 2: build/mindspore.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.10.0
env=build/mindspore
stamp=$env/.ready
wanted=$(cat pyproject.toml constraints/cpu.txt tools/mindspore_env.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

"${PYTHON:-python3}" -m venv "$env"
echo "mindspore: installing MindSpore $version and this package into $env (minutes)"
# Graph-kernel fusion imports `decorator`, which MindSpore does not declare.
"$env/bin/pip" install --quiet "mindspore==$version" decorator 'numpy<2' -c constraints/cpu.txt -e '.[torch,lora]' pytest pytest-timeout
echo "$wanted" > "$stamp"
