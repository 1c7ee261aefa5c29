"""The requests that `bench serve` sends: images made or read from a folder, as ready bytes in one file.

Load processes map the file, so that they share its memory. Knows bodies of `POST /embed`; nothing of sending.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

MAX_IMAGES = 512  # different ones of a folder; a bound on the size of the file
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_BOUNDARY = b"vision-sidecar-bench"
_NOISE = 8.0  # makes a JPEG of 336 x 336 about 32 KB, as photographs of that size have


@dataclass(frozen=True)
class Target:
    """What is in front of every body."""

    host: str  # as in the URL, with its port
    path: str  # with the query
    api_key: str | None


def make_photos(width: int, height: int, format_: str, seed: int) -> list[bytes]:
    """Different images like photographs, 4 to 32 of them: smooth gradients with noise. JPEG quality is 85."""
    rng = np.random.default_rng(seed)
    count = min(max(2**24 // (width * height), 4), 32)
    return [_make_photo(width, height, format_, rng) for _ in range(count)]


def _make_photo(width: int, height: int, format_: str, rng: np.random.Generator) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    noise = rng.standard_normal((height, width, 1), dtype=np.float32) * _NOISE
    file = io.BytesIO()
    photo = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
    photo.save(file, format_, quality=85, compress_level=1)
    return file.getvalue()


def read_photos(folder: Path) -> list[bytes]:
    """The first images of a folder by name. Raises `OSError`, also where there is none."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise FileNotFoundError(f"no image in {folder}")
    return [path.read_bytes() for path in paths[:MAX_IMAGES]]


def write_requests(
    target: Target, images: Sequence[bytes], images_per_request: int, file: IO[bytes]
) -> list[tuple[int, int]]:
    """Writes as many requests as there are images, and returns where each begins and ends."""
    spans = []
    for first in range(len(images)):
        some = [images[(first + index) % len(images)] for index in range(images_per_request)]
        start = file.tell()
        for chunk in _request(target, some):
            file.write(chunk)
        spans.append((start, file.tell()))
    file.flush()
    return spans


def _request(target: Target, images: Sequence[bytes]) -> Iterable[bytes]:
    """One image as it is, several as a form."""
    if len(images) == 1:
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


def _form(images: Sequence[bytes]) -> Iterator[bytes]:
    for index, image in enumerate(images):
        name = b'Content-Disposition: form-data; name="image"; filename="%d"' % index
        yield b"--%b\r\n%b\r\nContent-Type: application/octet-stream\r\n\r\n" % (_BOUNDARY, name)
        yield image
        yield b"\r\n"
    yield b"--%b--\r\n" % _BOUNDARY
