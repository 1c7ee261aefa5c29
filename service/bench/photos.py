"""The requests that `bench serve` sends: images, made or read from a folder, as complete bytes in one file.

Load processes map the file, so that they share its memory. Knows bodies of `POST /embed` and of chats. Knows
nothing of sending.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from service.bench.load import STAMP_BYTES, Span

MAX_IMAGES = 512  # of a folder; bounds the size of the file
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_IMAGE_PARAM = re.compile(r"images\[(\d+)\]")
_BOUNDARY = b"vision-sidecar-bench"
_NOISE = 8.0  # with it, a JPEG of 336 x 336 has about 32 KB, like a photograph of that size


@dataclass(frozen=True)
class Target:
    """The parts of every request head that depend on the server."""

    host: str  # with the port, as in the URL
    path: str  # with the query
    api_key: str | None
    chat_model: str | None = None  # the requests are chats with this model if it is given


def make_photos(width: int, height: int, format_: str, seed: int) -> dict[str, bytes]:
    """Makes 4 to 32 different images like photographs: smooth gradients with noise. JPEG quality is 85."""
    rng = np.random.default_rng(seed)
    count = min(max(2**24 // (width * height), 4), 32)
    return {f"made image {number}": _make_photo(width, height, format_, rng) for number in range(count)}


def _make_photo(width: int, height: int, format_: str, rng: np.random.Generator) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    noise = rng.standard_normal((height, width, 1), dtype=np.float32) * _NOISE
    file = io.BytesIO()
    photo = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
    photo.save(file, format_, quality=85, compress_level=1)
    return file.getvalue()


def read_photos(folder: Path) -> dict[str, bytes]:
    """The first images of a folder, by file name in order. Raises `OSError`, also if there is none."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"no image in {folder}")
    return {path.name: path.read_bytes() for path in paths[:MAX_IMAGES]}


def with_stamp(image: bytes) -> bytes:
    """The image with a stamp behind it, which can be overwritten to make files of other bytes.

    Decoders ignore it, as bytes behind the end; in AVIF and other files of boxes it is a box of free space.
    The length is a multiple of 3, so that the stamp is also at the end of the image in base64.
    """
    padding = b"0" * (-(len(image) + 8 + STAMP_BYTES) % 3)
    stamp = padding + b"0" * STAMP_BYTES
    return image + (8 + len(stamp)).to_bytes(4, "big") + b"free" + stamp


def write_requests(
    target: Target, images: Sequence[bytes], images_per_request: int, file: IO[bytes], *, stamped: bool
) -> list[Span]:
    """Writes as many requests as there are images. Request n begins with image n. Returns their spans.

    With `stamped`, each image has a stamp at its end.
    """
    spans = []
    if stamped:
        images = [with_stamp(image) for image in images]
    if target.chat_model is not None:
        images = [base64.b64encode(image) for image in images]
    for first in range(len(images)):
        some = [images[(first + index) % len(images)] for index in range(images_per_request)]
        start = file.tell()
        stamps = []
        for chunk in _request(target, some):
            file.write(chunk)
            if stamped and any(chunk is image for image in some):
                stamps.append(file.tell() - STAMP_BYTES)
        spans.append(Span(start, file.tell(), tuple(stamps)))
    file.flush()
    return spans


def name_refused(
    names: Sequence[str], images_per_request: int, refused: Mapping[tuple[int, str], str]
) -> dict[str, str]:
    """The error code of each image that the server refused, by name. `refused` is as in `Notes`."""
    found = {}
    for (number, param), code in refused.items():
        index = _IMAGE_PARAM.fullmatch(param)
        if index:
            found[names[(number + int(index[1])) % len(names)]] = code
        elif not param and images_per_request == 1:  # such as a body that is too large
            found[names[number]] = code
    return dict(sorted(found.items()))


def _request(target: Target, images: Sequence[bytes]) -> Iterable[bytes]:
    """One request: a chat, or a body that is a single image or a form of several."""
    if target.chat_model is not None:
        content_type, body = b"application/json", list(_chat(target.chat_model, images))
    elif len(images) == 1:
        content_type, body = b"application/octet-stream", list(images)
    else:
        content_type, body = b"multipart/form-data; boundary=" + _BOUNDARY, list(_form(images))
    lines = [
        f"POST {target.path} HTTP/1.1".encode(),
        b"host: " + target.host.encode(),
        b"content-type: " + content_type,
        b"content-length: %d" % sum(map(len, body)),
    ]
    if target.api_key is not None:
        lines.append(b"authorization: Bearer " + target.api_key.encode())
    return [b"\r\n".join(lines) + b"\r\n\r\n", *body]


def _chat(model: str, images: Sequence[bytes]) -> Iterator[bytes]:
    """A chat that asks for a single token, so that its answer ends with the first one. `images` in base64."""
    options = {"model": model, "max_tokens": 1, "temperature": 0}
    yield json.dumps(options)[:-1].encode() + b', "messages": [{"role": "user", "content": ['
    for image in images:
        yield b'{"type": "image_url", "image_url": {"url": "data:image/*;base64,'
        yield image
        yield b'"}}, '
    yield b'{"type": "text", "text": "Describe it."}]}]}'


def _form(images: Sequence[bytes]) -> Iterator[bytes]:
    for index, image in enumerate(images):
        name = b'Content-Disposition: form-data; name="image"; filename="%d"' % index
        yield b"--%b\r\n%b\r\nContent-Type: application/octet-stream\r\n\r\n" % (_BOUNDARY, name)
        yield image
        yield b"\r\n"
    yield b"--%b--\r\n" % _BOUNDARY
