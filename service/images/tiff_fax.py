"""Fax-compressed rows in a TIFF (CCITT T.4 and T.6): whether the data are enough for so many rows.

libtiff makes a white row of a row that it cannot decode, and goes on. Without this check a few bytes of
anything would be a tall white picture. Knows nothing of limits or pixels.
"""

from __future__ import annotations

from service.images.tiff import TiffHeader
from service.images.tiff_layouts import GROUP_3, GROUP_4, RLE

# The least that a row takes. A T.6 row may be one bit; after RLE each row starts with a new byte.
_MIN_ROW_BITS = {RLE: 8, GROUP_3: 1, GROUP_4: 1}


def are_rows_plausible(tiff: TiffHeader) -> bool:
    """Whether the strips or tiles have at least the bits that their rows take."""
    num_bits = tiff.height * _MIN_ROW_BITS.get(tiff.compression, 0)
    return num_bits <= 8 * tiff.num_data_bytes
