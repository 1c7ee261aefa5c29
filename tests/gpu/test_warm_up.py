"""Every kernel is compiled before the first request. A new process shows it, because it starts with none."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

SCRIPT = """
import triton
from models import CudaGraphSettings, EncodeItem, OutputSpec, VisionEncoder
from tests.gpu.images import patches

graphs = CudaGraphSettings(token_budgets=(100,)) if {graphs} else None
encoder = VisionEncoder.from_pretrained("demo", device="cuda", cuda_graphs=graphs)
late = []
triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: late.append(fn.name)
for spec in (OutputSpec(), OutputSpec(pooled=True, normalize=True, deepstack=False)):
    for grids in ([(20, 20)], [(16, 16), (20, 20)], [(24, 40)], [(64, 64)]):
        encoder.run([EncodeItem(image, spec) for image in patches(*grids)])
print(late)
"""


@pytest.mark.parametrize("graphs", [True, False])
def test_no_kernel_is_compiled_for_a_request(graphs: bool) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(graphs=graphs)], capture_output=True, text=True, timeout=180
    )
    assert process.stdout.splitlines()[-1:] == ["[]"], process.stderr[-2000:]
