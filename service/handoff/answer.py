"""Writes the answer of `format=handoff`: where the tokens of each image are, in place of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from service.answers.answer import Answer, ModelIdentity
from service.answers.dtypes import DtypeName
from service.handoff.entry import Entry


def handoff_answer(model: ModelIdentity, dtype: DtypeName, entries: Sequence[Entry]) -> Answer:
    """One item for each image, in the order of the request. `dtype` is that of the tokens."""
    body = {
        "object": "list",
        "model": model.name,
        "revision": model.revision,
        "fingerprint": model.fingerprint,
        "dtype": dtype,
        "data": [_item(entry) for entry in entries],
        "usage": {"num_images": len(entries), "num_tokens": sum(entry.num_tokens for entry in entries)},
    }
    return Answer((orjson.dumps(body),), "application/json")


def _item(entry: Entry) -> dict[str, object]:
    return {
        "uuid": entry.uuid,
        "grid_thw": entry.grid_thw,
        "num_tokens": entry.num_tokens,
        "width": entry.width,
        "dtype": entry.dtype,
        "bytes": entry.num_bytes,
    }
