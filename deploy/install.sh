#!/bin/sh
# Installs this project into a virtual environment, with the versions of deploy/constraints.txt.
# usage: deploy/install.sh VENV [REQUIREMENT]   (REQUIREMENT: ".", or with extras such as ".[dev]" or ".[dev,ray]")
# Without REQUIREMENT it installs torch alone.
# TORCH=cpu or TORCH=cuda selects the build of torch. Without it, a machine with an NVIDIA GPU gets CUDA.
set -eu
venv=$1
requirement=${2-}
cd "$(dirname "$0")/.."

constraints=deploy/constraints.txt
version=$(sed -n 's/^torch==//p' $constraints)
pip="$venv/bin/python -m pip --disable-pip-version-check"

if [ -z "${TORCH:-}" ]; then
    if nvidia-smi >/dev/null 2>&1; then TORCH=cuda; else TORCH=cpu; fi
fi
case $TORCH in
    cpu | cuda) ;;
    *) echo "TORCH must be cpu or cuda, not $TORCH" >&2 && exit 2 ;;
esac

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"

# Compare the installed build with the wanted one. Only on Linux, the version of a CPU build ends in +cpu.
installed=$($pip show torch 2>/dev/null | sed -n 's/^Version: //p')
case "$(uname -s) $TORCH $installed" in
    "Linux cpu $version+cpu") torch= ;;
    "Linux cpu "*) torch="torch==$version+cpu" ;;
    "Linux cuda $version+cpu") torch="torch==$version" ;;
    *" $version" | *" $version+"*) torch= ;;
    *) torch="torch==$version" ;;
esac

if [ -n "$torch" ]; then
    # To pip, all builds of a version are the same, so it would keep the wrong one.
    [ -z "$installed" ] || $pip uninstall -q -y torch
    # pip finds the CPU build only if its configuration names an index that has it. uv knows the index of PyTorch.
    if ! why=$($pip install -q "$torch" 2>&1); then
        printf '%s\n' "$why" >&2
        [ "$torch" != "torch==$version" ] || exit 1
        echo "pip has no CPU build of torch; asking uv for it" >&2
        $pip install -q -c $constraints uv
        "$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" --torch-backend cpu "torch==$version"
    fi
fi
[ -n "$requirement" ] || exit 0
# With CUDA, install the kernels of the extra `gpu`. The server uses them if the GPU supports them.
case "$TORCH $requirement" in
    "cuda "*"]") requirement="${requirement%]},gpu]" ;;
    "cuda "*) requirement="${requirement}[gpu]" ;;
esac
$pip install -q -c $constraints -e "$requirement"
