#!/bin/sh
# Makes a virtual environment with this project in it, at the versions of deploy/constraints.txt.
# usage: deploy/install.sh VENV REQUIREMENT     (REQUIREMENT: ".", ".[dev]", ".[gpu]", …)
# TORCH=cpu or TORCH=cuda picks the build of torch; without it, a machine with an NVIDIA GPU gets CUDA.
set -eu
venv=$1
requirement=$2
cd "$(dirname "$0")/.."

constraints=deploy/constraints.txt
torch=$(sed -n 's/^torch==//p' $constraints)
pip="$venv/bin/python -m pip --disable-pip-version-check"

if [ -z "${TORCH:-}" ]; then
    if nvidia-smi >/dev/null 2>&1; then TORCH=cuda; else TORCH=cpu; fi
fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if ! $pip show torch 2>/dev/null | grep -q "^Version: $torch"; then
    if [ "$TORCH" = cuda ] || [ "$(uname -s)" != Linux ]; then
        $pip install -q "torch==$torch"
    # pip finds the CPU build where its configuration offers one; uv knows where PyTorch keeps it.
    elif ! $pip install -q "torch==$torch+cpu" 2>/dev/null; then
        $pip install -q -c $constraints uv
        "$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" --torch-backend cpu "torch==$torch"
    fi
fi
$pip install -q -c $constraints -e "$requirement"
