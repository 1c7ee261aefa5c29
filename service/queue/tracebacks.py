"""Errors that hold on to nothing.

An error that is kept leads by its traceback to the frames that it came through, and by these to all that was
worked on. Where one of them leads back to who keeps it, all of it stays until garbage is collected.
"""

from __future__ import annotations

import traceback
from typing import TypeVar

from service.errors import ApiError

E = TypeVar("E", bound=BaseException)


def without_traceback(error: E) -> E:
    """The same error, for who caught it and is about to keep it, without its frames and those of its causes.

    Where a log may want them, which is for all but `ApiError`, their lines become a note.
    """
    if not isinstance(error, ApiError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
