"""One image in the store: its uuid, and what a reader must know of its tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Only a text that matches as a whole is joined to a path or a URL.
UUID = re.compile(r"vs1-[0-9a-f]{64}")
# The names of files in the folder: a whole entry, a promise to write one, and one that is being written.
SUFFIX, CLAIM_SUFFIX, PART_SUFFIX = ".safetensors", ".claim", ".part"


@dataclass(frozen=True)
class Entry:
    """The tokens of one image, as a safetensors file with the tensor `tokens` [num_tokens, width]."""

    uuid: str
    grid_thw: tuple[int, int, int]  # in patches, before the spatial merge
    num_tokens: int
    width: int  # number of columns, deepstack columns included
    dtype: str  # of the tokens, such as `bfloat16`
    num_bytes: int  # of the file
