"""The first steps of a process that the supervisor has started."""

from __future__ import annotations

import signal
from typing import TypeVar

from service.config.logs import configure_logging
from service.processes.wire.link import Link
from service.processes.wire.messages import STOP_SIGNALS, DeviceSetup, Setup

S = TypeVar("S", Setup, DeviceSetup)


def bootstrap(file: int, kind: type[S]) -> tuple[S, list[int], Link]:
    """Returns the set-up of the process, the files that came with it, and the link to the supervisor.

    `file` is that link. Signals to stop are ignored from now on; the supervisor blocked them until here.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    link = Link.of_file(file)
    setup, files = link.receive()
    assert isinstance(setup, kind), f"not a set-up: {setup!r}"
    configure_logging(setup.settings.log_level, setup.settings.log_format)
    return setup, files, link
