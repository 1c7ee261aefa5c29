from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from models import BatchResult, EncodeItem, ModelError, OutputSpec, Replica, VisionEncoder


@pytest.fixture(scope="module")
def demo() -> VisionEncoder:
    return VisionEncoder.from_pretrained("demo", device="cpu")


def item(encoder: VisionEncoder) -> EncodeItem:
    rgb = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    return EncodeItem(encoder.preprocess(rgb), OutputSpec(pooled=True, deepstack=False))


def test_loads_and_runs_in_one_thread(demo: VisionEncoder) -> None:
    threads: list[int] = []

    class Recording(VisionEncoder):
        def __init__(self) -> None:
            threads.append(threading.get_ident())

        def run(self, items: Sequence[EncodeItem]) -> BatchResult:
            threads.append(threading.get_ident())
            return demo.run(items)

    replica = Replica("cpu", Recording)
    for _ in range(3):
        assert replica.submit([item(demo)]).result(10).embeddings[0].shape == (demo.hidden_size,)
    replica.close()
    assert len(threads) == 4
    assert set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1


def test_a_failed_load_is_the_error_of_ready_and_of_every_batch(demo: VisionEncoder) -> None:
    def load() -> VisionEncoder:
        raise ModelError("no such model")

    replica = Replica("cpu", load)
    batch = replica.submit([item(demo)])
    for future in (replica.ready, batch):
        with pytest.raises(ModelError, match="no such model"):
            future.result(10)
    replica.close()


def test_an_error_in_one_batch_leaves_the_next_alone(demo: VisionEncoder) -> None:
    replica = Replica("cpu", lambda: demo)
    good = item(demo)
    patches = type(good.patches)(good.patches.pixels[:7], good.patches.grid_thw, good.patches.num_tokens)
    failed = replica.submit([EncodeItem(patches, good.output)])
    served = replica.submit([good])
    with pytest.raises(ValueError, match="which their grid says"):
        failed.result(10)
    assert served.result(10).stats.num_images == 1
    replica.close()


def test_close_waits_for_what_was_submitted_and_takes_no_more(demo: VisionEncoder) -> None:
    replica = Replica("cpu", lambda: demo)
    futures = [replica.submit([item(demo)]) for _ in range(5)]
    replica.close()
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError):
        replica.submit([item(demo)])
