"""Small files of every format and of the variants that decoders treat differently, and how to break them."""

from __future__ import annotations

import random
from typing import Literal

import numpy as np
from PIL import Image

from tests.support.image_files import save


def seeds() -> dict[str, bytes]:
    rgb = np.random.default_rng(1).integers(0, 255, (6, 8, 3), np.uint8)
    image = Image.fromarray(rgb).resize((40, 28), Image.Resampling.BICUBIC)
    rgba = image.convert("RGBA")
    rgba.putalpha(image.convert("L"))
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "a maker with a name"
    few = image.quantize(12)
    sixteen = Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
    files = {
        "jpeg": save(image, "JPEG", exif=exif),
        "jpeg-progressive": save(image, "JPEG", progressive=True),
        "jpeg-gray": save(image.convert("L"), "JPEG", restart_marker_rows=1),
        "jpeg-cmyk": save(image.convert("CMYK"), "JPEG"),
        "png": save(image, "PNG", exif=exif),
        "png-rgba": save(rgba, "PNG"),
        "png-palette": save(few, "PNG", transparency=bytes(range(12))),
        "png-16": save(sixteen, "PNG"),
        "apng": save(image, "PNG", save_all=True, append_images=[image.rotate(90)]),
        "gif": save(few, "GIF", transparency=3, comment=b"hello"),
        "gif-animated": save(image, "GIF", save_all=True, append_images=[image.rotate(90)], disposal=2),
        "bmp": save(image, "BMP"),
        "bmp-palette": save(few, "BMP"),
        "webp": save(image, "WEBP", exif=exif),
        "webp-lossless": save(rgba, "WEBP", lossless=True),
        "webp-animated": save(image, "WEBP", save_all=True, append_images=[image.rotate(90)]),
        "avif": save(image, "AVIF", exif=exif),
        "avif-rgba": save(rgba, "AVIF"),
        "tiff": save(image, "TIFF", exif=exif),
        "tiff-16": save(sixteen, "TIFF"),
        "tiff-big": save(image, "TIFF", big_tiff=True),
        "tiff-pages": save(few, "TIFF", save_all=True, append_images=[image.rotate(90)]),
    }
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "zstd"):
        files[f"tiff-{compression}"] = save(image, "TIFF", compression=compression)
    files["tiff-group4"] = save(image.convert("1"), "TIFF", compression="group4")
    return files


SEEDS = seeds()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A truncation, changed bytes or bits, swapped or repeated blocks, an extreme number, or noise put in."""
    out = bytearray(data)
    kind = rng.randrange(7)
    at = rng.randrange(len(out))
    if kind == 0:
        return bytes(out[:at])
    if kind == 1:
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 2:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        size = rng.randrange(1, 2 + len(out) // 4)
        other = rng.randrange(len(out))
        block = out[at : at + size]
        out[at : at + size] = out[other : other + size]
        out[other : other + len(block)] = block
    elif kind == 4:
        size = rng.choice((2, 4))
        number = rng.choice((0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size) - 1, len(out), 65_535, 4000))
        order: Literal["big", "little"] = rng.choice(("big", "little"))
        at = rng.randrange(min(len(out), rng.choice((40, 400, 1 << 20))))
        out[at : at + size] = number.to_bytes(size, order)
    elif kind == 5:
        out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 100)))
    else:
        out[at:at] = out[at : at + rng.randrange(1, 64)] * rng.choice((1, 10, 200))
    return bytes(out)
