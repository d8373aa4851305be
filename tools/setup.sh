#!/usr/bin/env bash
# Make .venv ready: one command for a laptop, a CI machine and an accelerator machine.
#
#   torch >= 2.11 already works for this Python   the environment sees it, nothing is fetched for torch
#   an NVIDIA GPU, no torch                       the newest torch (brings CUDA)
#   neither                                       the pinned CPU version of constraints/cpu.txt
#
# Runs again only when pyproject.toml, the constraints or this script changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/.ready
wanted=$(cat pyproject.toml constraints/*.txt tools/setup.sh | cksum)
ready() {
    echo "setup: the command is .venv/bin/hyper-parallel; \`source .venv/bin/activate\` puts it on the PATH"
}
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    ready
    exit 0
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Python 3.11 or newer is needed, $("$python" --version) found" >&2
    echo "hint: PYTHON=/path/to/python3.11 make setup" >&2
    exit 1
}

# An environment that sees packages of others sees those of the Python itself, not of an environment that is active.
python=$("$python" -c 'import sys; print(sys._base_executable)')

has_torch() {
    "$1" -c 'import sys, torch; v = torch.__version__.split("+")[0].split(".")
sys.exit((int(v[0]), int(v[1])) < (2, 11))' 2>/dev/null
}

flags=()
constraint=()
if has_torch "$python"; then
    echo "setup: using the torch that is already installed"
    flags+=(--system-site-packages)
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    echo "setup: NVIDIA GPU found, installing torch with CUDA"
else
    echo "setup: no accelerator found, installing the CPU version of torch pinned in constraints/cpu.txt"
    constraint=(-c constraints/cpu.txt)
fi

[ -x .venv/bin/python ] || "$python" -m venv "${flags[@]}" .venv
.venv/bin/python -m pip install --progress-bar on --disable-pip-version-check "${constraint[@]}" -e '.[torch,lora,dev]'
has_torch .venv/bin/python || {
    echo "error: torch >= 2.11 does not import in .venv" >&2
    echo "hint: rm -rf .venv && make setup" >&2
    exit 1
}
echo "$wanted" >"$stamp"
ready
