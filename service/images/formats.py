"""The format of image data, from their content only, never from a file name or a declared type.

Knows signatures. Knows nothing of headers, pixels or limits.
"""

from __future__ import annotations

import re
import zlib
from typing import Literal

from service.errors import BadRequest, UnsupportedMedia

ImageFormat = Literal["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]

SERVED_FORMATS = "JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF"

_PEEK = 4096  # bytes of text that are read

_SERVED: tuple[tuple[bytes, ImageFormat], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"MM\0*", "TIFF"),
)

# (offset, signature, name) of files that people send by mistake. The first match names the data.
_NOT_SERVED: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"%PDF-", "PDF"),
    (0, b"PK\3\4", "a ZIP archive or an Office document"),
    (0, b"PK\5\6", "a ZIP archive"),
    (0, b"Rar!\x1a\7", "a RAR archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (0, b"\xfd7zXZ\0", "xz-compressed data"),
    (0, b"BZh", "bzip2-compressed data"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed data"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x1a\x45\xdf\xa3", "a WebM or Matroska video"),
    (0, b"\0\0\1\xba", "an MPEG video"),
    (0, b"\0\0\1\xb3", "an MPEG video"),
)

_AVIF_BRANDS = {b"avif", b"avis"}
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
# The major brands that Pillow's AVIF decoder looks into.
_AVIF_MAJOR_BRANDS = {b"avif", b"avis", b"mif1", b"msf1"}

_DATA_URI = re.compile(rb"\s*data:[\w/+.-]*[;,]", re.IGNORECASE)

_TEXT: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"\s*<(?:!doctype\s+html|html|head|body)[\s>]", re.IGNORECASE), "an HTML page"),
    (re.compile(rb"\s*<(?:[^\0]*<)?(?:[a-z]+:)?svg[\s>/]", re.IGNORECASE), "SVG"),
    (re.compile(rb"\s*<(?:\?xml|!--|!doctype)[\s>\-]", re.IGNORECASE), "an XML document"),
    (re.compile(rb"\s*(?:\{\s*[\"}]|\[\s*[\[{\"\d\]-])"), "JSON"),
)


def sniff(data: bytes) -> ImageFormat:
    """The format of the image in `data`, if it is served.

    Raises `UnsupportedMedia` (415, `unsupported_image_format`) for data that are recognised but not
    served, by name, and `BadRequest` (400, `empty_input` or `invalid_image`) for anything else.
    """
    if data.startswith(_SERVED[0][0]):  # most requests
        return "JPEG"
    if not data:
        raise BadRequest("the image is empty", code="empty_input")
    served = _served(data)
    if served is not None:
        return served
    if data.startswith(b"\xff\xd8"):
        raise BadRequest("the JPEG data is broken or truncated", code="invalid_image")
    name = _name(data)
    if name is not None:
        raise unsupported(name)
    if _DATA_URI.match(data[:_PEEK]):
        raise UnsupportedMedia(
            "the data is the text of a data: URI; send the bytes of the image, or send the URI inside JSON; "
            f"the formats served are {SERVED_FORMATS}",
            code="unsupported_image_format",
        )
    raise BadRequest(f"not an image; the formats served are {SERVED_FORMATS}", code="invalid_image")


def unsupported(name: str) -> UnsupportedMedia:
    """The error for data that are recognised as `name` but not served."""
    return UnsupportedMedia(
        f"the data is {name}, which is not served; the formats served are {SERVED_FORMATS}",
        code="unsupported_image_format",
    )


def _served(data: bytes) -> ImageFormat | None:
    for signature, name in _SERVED:
        if data.startswith(signature):
            return name
    if data.startswith(b"II*\0"):
        return None if data[8:10] == b"CR" else "TIFF"  # the mark of Canon's raw files
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith(b"BM") and len(data) >= 18 and data[15:18] == b"\0\0\0":  # header size below 256
        return "BMP"
    if data[4:8] == b"ftyp" and data[8:12] in _AVIF_MAJOR_BRANDS and _brands(data) & _AVIF_BRANDS:
        return "AVIF"
    return None


def _name(data: bytes) -> str | None:
    """What the data are, if they are recognised."""
    for offset, signature, name in _NOT_SERVED:
        if data.startswith(signature, offset):
            return name
    if data.startswith(b"II*\0"):
        return "a camera raw file"
    if data[4:8] == b"ftyp":
        is_heif = _brands(data) & _HEIF_BRANDS
        return "HEIC or HEIF" if is_heif else "a video (MP4 or QuickTime) or another ISO media file"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "an AVI video"
    if data.startswith(b"\x1f\x8b"):
        return _gzip_name(data)
    return _text_name(data[:_PEEK])


def _brands(data: bytes) -> set[bytes]:
    """The major and compatible brands of an ISO media file."""
    end = min(int.from_bytes(data[:4], "big"), 512)
    return {data[8:12]} | {data[at : at + 4] for at in range(16, end - 3, 4)}


def _gzip_name(data: bytes) -> str:
    try:
        head = zlib.decompressobj(31).decompress(data[:_PEEK], _PEEK)
    except zlib.error:
        return "gzip-compressed data"
    return "SVG, compressed" if _text_name(head) == "SVG" else "gzip-compressed data"


def _text_name(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head.decode("utf-16", "ignore").encode()
    head = head.removeprefix(b"\xef\xbb\xbf")
    for pattern, name in _TEXT:
        if pattern.match(head):
            return name
    return None
