"""Where the tokens of an image go in place of its result, such as into a file.

Tokens have megabytes, and the memory that the device copies them to is used again. So they are written from
there, in parallel, without another copy. Knows arrays on the host; nothing of files or of names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

# Enough to copy faster than a GPU encodes. Idle threads cost nothing.
_NUM_WRITERS = 4
_WRITERS = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="tokens")


class TokenWriting(Protocol):
    """The tokens of one image on their way."""

    def allocate(self, *, alone: bool) -> None:
        """Allocates memory for the tokens, which takes most of the time. Runs before they are there.

        `alone`: no other image is in the batch, so that a short wait is worth more than time of the CPU.
        """

    def parts(self, rows: torch.Tensor) -> Sequence[Callable[[], None]]:
        """Calls that write the tokens, each a part of `rows` [tokens, width] on the host.

        They may run in any threads at the same time.
        """

    def commit(self) -> None:
        """Makes the tokens visible, once all parts are written."""

    def discard(self) -> None:
        """Drops everything that is not committed."""


class TokenSink(Protocol):
    """The destination of the tokens of one image."""

    def open(self, shape: tuple[int, int], dtype: torch.dtype) -> TokenWriting:
        """Begins to write tokens of that shape. Raises `OSError`."""


def allocate(writings: Collection[TokenWriting], *, alone: bool) -> None:
    """Starts to allocate memory for the tokens of images. An error shows when they are written."""
    for writing in writings:
        _WRITERS.submit(writing.allocate, alone=alone)


def write_tokens(pairs: Sequence[tuple[TokenWriting, torch.Tensor]]) -> None:
    """Writes the tokens of several images, each [tokens, width] on the host. Raises the first error."""
    parts = [_WRITERS.submit(part) for writing, rows in pairs for part in writing.parts(rows)]
    errors = [part.exception() for part in parts]  # waits for all of them: they read the rows
    for error in errors:
        if error is not None:
            raise error
    for writing, _ in pairs:
        writing.commit()
