"""The JPEGs in a TIFF: one for each strip or tile. A decoder allocates the size that each JPEG states.

Knows nothing of limits or pixels.
"""

from __future__ import annotations

from service.images.formats import unsupported
from service.images.jpeg import has_end, is_plausible, read_jpeg
from service.images.tiff import TiffHeader

_MAX_SEGMENTS = 1 << 17  # of all pieces, to limit the time that reading them takes


def are_pieces_plausible(data: bytes, tiff: TiffHeader) -> bool:
    """Whether each JPEG fits its strip or tile, has its end marker and is plausible by itself.

    The last strip may be as tall as the others. libtiff would fill a truncated JPEG with gray, without an
    error. Raises `UnsupportedMedia` for a kind that is not decoded, and any `Exception` for broken data.
    """
    if tiff.jpegs is None:
        return True
    if sum(size for _, size in tiff.jpegs.places) > len(data):
        return False  # they overlap
    num_segments = 0
    for offset, size in tiff.jpegs.places:
        piece = data[offset : offset + size]
        jpeg = read_jpeg(piece)
        if jpeg.unserved_kind is not None:
            raise unsupported(f"TIFF with {jpeg.unserved_kind}")
        num_segments += jpeg.num_segments
        fits = jpeg.width <= tiff.jpegs.max_width and jpeg.height <= tiff.jpegs.max_height
        if not fits or num_segments > _MAX_SEGMENTS:
            return False
        if not has_end(piece) or not is_plausible(piece, jpeg, jpeg.width * jpeg.height):
            return False
    return True
