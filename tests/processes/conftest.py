"""Parts of a server of several processes, in the process of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from models import ReplicaGroup
from service.config.settings import Settings
from service.processes.supervisor import members
from service.processes.supervisor.members import DEVICE_PROCESS, Process
from service.processes.wire.link import Link
from tests.support import forkserver
from tests.support.app import FakeEncoder, fake_replicas, only
from tests.support.dispatching import MakeCompany
from tests.support.processes import Company, ThreadAsProcess
from tests.support.queueing import Callers
from tests.support.supervising import StartSupervisor, Supervised


@pytest.fixture
def make_dispatch(callers: Callers) -> Iterator[MakeCompany]:
    made: list[Company] = []

    def make_company(**options: object) -> Company:
        made.append(Company(callers, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make_company
    for company in made:
        company.close()


@pytest.fixture
def start_supervisor() -> Iterator[StartSupervisor]:
    running: list[Supervised] = []
    groups: list[ReplicaGroup] = []
    devices: list[ThreadAsProcess] = []

    def start_company(
        *encoders: FakeEncoder,
        num_servers: int = 2,
        load: Callable[[], object] = lambda: None,
        is_deaf: bool = False,
        is_anew: bool = False,
        **changes: object,
    ) -> Supervised:
        """Without encoders the devices are processes, too, with the demo model.

        With `is_anew` processes are new interpreters, as outside of tests; else they are forked.
        """
        changes = {"data_parallel_size": len(encoders) or 1, **changes}
        settings = only(
            Settings(device="cpu", decode_threads=2, shutdown_grace_s=35, cache_bytes=0), **changes
        )
        if encoders:
            groups.append(fake_replicas(*encoders, load=load, name="cpu"))

        def spawn(module: str, link: Link) -> Process:
            if module == DEVICE_PROCESS and encoders:
                devices.append(ThreadAsProcess(link, groups[-1], is_deaf))
                return devices[-1]
            return members.spawn(module, link) if is_anew else forkserver.spawn(module, link)

        running.append(Supervised(settings, num_servers, spawn))
        return running[-1]

    yield start_company
    for device in devices:
        device.end()
    for group in groups:
        group.close()
    for device in devices:
        device.close()
    for company in running:
        company.close()
