"""Where the tokens of an image go in place of its result, such as into a file.

Tokens have megabytes, and the memory that the device copies them to is used again. So they are written from
there, in parallel, without another copy. Knows arrays on the host; nothing of files or of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Protocol

import torch

# Enough to copy faster than a GPU encodes. Idle threads cost nothing.
_NUM_WRITERS = 4
_WRITERS = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="tokens")


class TokenWriting(Protocol):
    """The tokens of one image on their way."""

    def parts(self) -> Sequence[Callable[[], None]]:
        """Calls that write the tokens, each a part. They may run in any threads at the same time."""

    def commit(self) -> None:
        """Makes the tokens visible, once all parts are written."""

    def discard(self) -> None:
        """Drops everything that is not committed."""


class TokenSink(Protocol):
    """The destination of the tokens of one image."""

    def open(self, rows: torch.Tensor) -> TokenWriting:
        """`rows` [tokens, width] stay as they are until `commit` or `discard`. Raises `OSError`."""


def write_tokens(pairs: Sequence[tuple[TokenSink, torch.Tensor]]) -> None:
    """Writes the tokens of several images, each [tokens, width] on the host, to their sinks.

    Raises the first error of a sink. Images that were not written completely are discarded.
    """
    with ExitStack() as stack:
        writings: list[TokenWriting] = []
        for sink, rows in pairs:
            writings.append(sink.open(rows))
            stack.callback(writings[-1].discard)
        parts = [_WRITERS.submit(part) for writing in writings for part in writing.parts()]
        errors = [part.exception() for part in parts]  # waits for all of them: they read the rows
        for error in errors:
            if error is not None:
                raise error
        for writing in writings:
            writing.commit()
