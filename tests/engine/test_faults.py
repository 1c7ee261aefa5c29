"""Faults that one request must not spread to others, and stops under load."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

import httpx
import pytest
import torch

from models import EncodeItem
from service.engine.engine import State
from tests.support.app import FakeEncoder
from tests.support.faults import (
    FailingAtLaunch,
    Held,
    InBackground,
    Serve,
    check_answered,
    complaints,
    requests,
    slowly,
)
from tests.support.serving import HeldUpload, call_all, request_of
from tests.support.traffic import Answer, call, leave

pytestmark = pytest.mark.usefixtures("log")


def level_of(item: EncodeItem) -> int:
    """The gray level of an image that a fake encoder encodes."""
    return int(item.patches.pixels.flatten()[0])


@pytest.mark.parametrize("num_devices", [1, 2])
def test_callers_that_leave_do_not_disturb_others(
    serve_faulty: Serve, num_devices: int, log: pytest.LogCaptureFixture
) -> None:
    served = serve_faulty(*(FakeEncoder(slowly) for _ in range(num_devices)))
    wanted, rng = requests(150), random.Random(1)
    leaving = set(rng.sample(range(len(wanted)), 45))

    async def act(index: int) -> Answer | None:
        await asyncio.sleep(index / 500)
        request = request_of(*wanted[index])
        if index not in leaving:
            return await call(served.port, request)
        num_bytes = rng.choice([len(request), len(request), rng.randrange(len(request))])
        await leave(
            served.port, request, num_bytes=num_bytes, wait_s=rng.uniform(0, 0.06), reset=index % 2 == 0
        )
        return None

    async def act_all() -> list[Answer | None]:
        return await asyncio.gather(*(act(index) for index in range(len(wanted))))

    answers = asyncio.run(act_all())
    stayed = [(answer, wanted[index]) for index, answer in enumerate(answers) if answer is not None]
    check_answered([answer for answer, _ in stayed], [levels for _, levels in stayed])
    statuses = served.check_settled(len(wanted))
    assert set(statuses) == {200, 499}
    assert 10 <= statuses[499] <= 45  # some callers leave just after their answer was sent
    assert complaints(log) == []


@pytest.mark.parametrize(
    ("kind", "error"), [(FakeEncoder, RuntimeError), (FailingAtLaunch, torch.OutOfMemoryError)]
)
def test_failed_image_does_not_fail_other_requests_of_its_batch(
    serve_faulty: Serve, kind: type[FakeEncoder], error: type[Exception], log: pytest.LogCaptureFixture
) -> None:
    def fail(items: Sequence[EncodeItem]) -> None:
        slowly(items)
        if any(level_of(item) in (66, 77) for item in items):
            raise error("odd shape")

    served = serve_faulty(kind(fail))
    wanted = [*requests(60, levels=range(80, 250)), [66], [90, 77, 91], [92, 66, 77]]
    random.Random(2).shuffle(wanted)
    answers = asyncio.run(call_all(served.port, wanted))
    broken = [(answer, levels) for answer, levels in zip(answers, wanted, strict=True) if min(levels) < 80]
    for answer, levels in broken:
        assert (answer.status, answer.code) == (500, "internal_error")
        culprits = [f"images[{index}]" for index, level in enumerate(levels) if level < 80]
        assert answer.body["error"]["param"] in culprits
        assert "odd shape" not in str(answer.body)
    fine = [(answer, levels) for answer, levels in zip(answers, wanted, strict=True) if min(levels) >= 80]
    check_answered([answer for answer, _ in fine], [levels for _, levels in fine])
    assert served.check_settled(len(wanted)) == {200: 60, 500: 3}
    assert len(complaints(log)) == 3
    assert served.engine.state is State.READY


def test_late_body_is_answered_408_even_if_the_request_times_out_too(serve_faulty: Serve) -> None:
    served = serve_faulty(FakeEncoder(), request_timeout_s=0.1, body_timeout_s=0.1)
    upload = HeldUpload(served.port)
    assert served.check_settled(1) == {408: 1}
    upload.leave()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_requests_past_their_deadline_are_answered_while_the_device_is_busy(
    serve_faulty: Serve, num_devices: int, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    served = serve_faulty(*(FakeEncoder(Held(gate)) for _ in range(num_devices)), request_timeout_s=0.5)
    late = requests(40)
    answers = asyncio.run(call_all(served.port, late))  # returns while the gate is still closed
    assert Counter((answer.status, answer.code) for answer in answers) == {(504, "deadline_exceeded"): 40}
    assert served.scrape().total("queue_images") == 0
    gate.set()
    in_time = requests(20, seed=1)
    check_answered(asyncio.run(call_all(served.port, in_time)), in_time)
    assert served.check_settled(60) == {200: 20, 504: 40}
    encoded = sum(len(items) for encoder in served.encoders for items in encoder.batches)
    assert encoded == served.scrape().total("images_total") < sum(map(len, late + in_time))
    assert complaints(log) == []


def test_slow_device_answers_each_request_before_its_deadline_or_504(
    serve_faulty: Serve, log: pytest.LogCaptureFixture
) -> None:
    def very_slowly(items: Sequence[EncodeItem]) -> None:
        time.sleep(0.05)

    served = serve_faulty(FakeEncoder(very_slowly), request_timeout_s=0.5)
    wanted = requests(60)
    answers = asyncio.run(call_all(served.port, wanted))
    fine = [(answer, levels) for answer, levels in zip(answers, wanted, strict=True) if answer.status == 200]
    check_answered([answer for answer, _ in fine], [levels for _, levels in fine])
    statuses = served.check_settled(60)
    assert set(statuses) == {200, 504}
    assert complaints(log) == []


def test_stop_without_delay_finishes_accepted_requests_and_refuses_new_ones(
    serve_faulty: Serve, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    served = serve_faulty(FakeEncoder(Held(gate)))
    accepted = InBackground(served.port, requests(40))
    served.wait_until_in_flight(40)
    served.stop()
    served.wait_for(State.DRAINING)
    newcomers = asyncio.run(call_all(served.port, requests(5)))
    assert {(answer.status, answer.code) for answer in newcomers} == {(503, "draining")}
    gate.set()
    check_answered(accepted.answers(), accepted.requests)
    served.wait_for_the_end()
    assert served.check_settled(45) == {200: 40, 503: 5}
    assert complaints(log) == []


def test_stop_with_delay_accepts_requests_until_the_delay_is_over(
    serve_faulty: Serve, gate: threading.Event, log: pytest.LogCaptureFixture
) -> None:
    served = serve_faulty(FakeEncoder(Held(gate)), shutdown_delay_s=1.0)
    early = InBackground(served.port, requests(20))
    served.wait_until_in_flight(20)
    served.stop()
    served.wait_for(State.LEAVING)
    late = InBackground(served.port, requests(20, seed=1))
    served.wait_until_in_flight(40)
    assert served.engine.state is State.LEAVING
    assert httpx.get(f"http://127.0.0.1:{served.port}/readyz").json()["error"]["code"] == "draining"
    served.wait_for(State.DRAINING)
    [newcomer] = asyncio.run(call_all(served.port, [[5]]))
    assert (newcomer.status, newcomer.code) == (503, "draining")
    gate.set()
    for callers in (early, late):
        check_answered(callers.answers(), callers.requests)
    served.wait_for_the_end()
    assert served.check_settled(41) == {200: 40, 503: 1}
    assert complaints(log) == []
