#!/usr/bin/env bash
# An environment of its own for LlamaFactory, which caps the versions of transformers and accelerate: build/llamafactory.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.9.5
env=build/llamafactory
stamp=$env/.ready
wanted=$(cat pyproject.toml constraints/cpu.txt tools/llamafactory_env.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

"${PYTHON:-python3}" -m venv "$env"
echo "llamafactory: installing LlamaFactory $version and this package into $env (minutes)"
torch=$(grep '^torch==' constraints/cpu.txt) # transformers is LlamaFactory's choice
"$env/bin/pip" install --quiet "$torch" "llamafactory==$version" pytest pytest-timeout -e .
# Wheels of these for CUDA alone fail on a CPU; chats of text need the name of one and nothing of either.
if ! "$env/bin/python" -c "import torchvision, torchaudio" 2>/dev/null; then
    "$env/bin/pip" uninstall --quiet --yes torchvision torchaudio
    site=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    echo '"""Stands in for torchaudio: LlamaFactory imports it, chats of text use none of it."""' > "$site/torchaudio.py"
fi
echo "$wanted" > "$stamp"
