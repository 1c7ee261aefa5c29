"""Walks through JSON text and says where each value stands, so that the rest can stay as it is.

Knows JSON; knows nothing of what the text says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

NUMBER = object()  # stands for every number: converting thousands of digits would take time


def _number(text: str) -> object:
    return NUMBER


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_number)
_SPACE = re.compile(r"[ \t\n\r]*")
# Each member and each item takes some microseconds.
_MAX_STEPS = 65_536


class Scanner:
    """A place in JSON text. `at` is where the next value begins.

    All methods raise `ValueError` if the text is not JSON, and `RecursionError` if it is nested too deeply.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._num_steps_left = _MAX_STEPS
        self.at = 1 if text.startswith("\ufeff") else 0
        self._skip_space()

    def is_at(self, char: str) -> bool:
        """Whether the next value begins with `char`."""
        return self.text.startswith(char, self.at)

    def value(self) -> object:
        """Passes the next value and returns it, with `NUMBER` in place of each number."""
        value, self.at = _DECODER.raw_decode(self.text, self.at)
        return value

    def members(self) -> Iterator[str]:
        """Passes an object. Yields the name of each member; the caller passes its value."""
        for _ in self._elements("{", "}"):
            name = self.value()
            if not isinstance(name, str):
                raise ValueError("a member has no name")
            self._skip_space()
            self._take(":")
            self._skip_space()
            yield name

    def items(self) -> Iterator[None]:
        """Passes an array. Yields for each item, which the caller passes."""
        yield from self._elements("[", "]")

    def finish(self) -> None:
        """Only white space may follow."""
        self._skip_space()
        if self.at != len(self.text):
            raise ValueError("something follows the value")

    def _elements(self, first: str, last: str) -> Iterator[None]:
        self._take(first)
        self._skip_space()
        if self.is_at(last):
            self.at += 1
            return
        while True:
            self._num_steps_left -= 1
            if self._num_steps_left < 0:
                raise ValueError("too many values")
            yield
            self._skip_space()
            if self.is_at(last):
                self.at += 1
                return
            self._take(",")
            self._skip_space()

    def _take(self, char: str) -> None:
        if not self.is_at(char):
            raise ValueError(f"no {char}")
        self.at += 1

    def _skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None, "the pattern also matches nothing"
        self.at = match.end()
