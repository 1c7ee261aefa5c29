"""Errors without references to frames.

The traceback of an error refers to the frames that it passed through, and they refer to images and tensors.
If an object that keeps the error is among them, all of it stays in memory until the next garbage collection.
"""

from __future__ import annotations

import traceback
from typing import TypeVar

from service.errors import ApiError

E = TypeVar("E", bound=BaseException)


def without_traceback(error: E) -> E:
    """Removes the frames of an error and of its causes, before the error is kept. Returns the same error.

    For all errors but `ApiError`, which no log shows with its trace, the lines of the trace become a note.
    """
    if not isinstance(error, ApiError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
