"""Which layouts of the samples of a TIFF are decoded right. All others are refused by name.

Pillow decodes uncompressed files itself and compressed files with libtiff. Either way it decodes some layouts
wrongly without an error. The rules here come from comparing every combination with a picture made without
Pillow (tests/images/test_tiff_layouts.py). A layout that Pillow itself refuses needs no rule. Knows nothing
of files, sizes or limits.
"""

from __future__ import annotations

from dataclasses import dataclass

# Compressions.
NONE, RLE, GROUP_3, GROUP_4, LZW, JPEG, DEFLATE = 1, 2, 3, 4, 5, 7, 8
PACKBITS, OLD_DEFLATE, ZSTD = 32773, 32946, 50000
_WITH_PREDICTOR = {LZW, DEFLATE, OLD_DEFLATE, ZSTD}
_DIFFERENCES = 2  # the predictor that stores differences between neighbours

# Photometric interpretations.
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_GRAY_OR_PALETTE = {_WHITE_IS_ZERO, _BLACK_IS_ZERO, _PALETTE}
_NUM_COLORS = {_RGB: 3, _CMYK: 4}
_COLOR_NAMES = {
    0: "gray",
    1: "gray",
    _RGB: "RGB",
    _PALETTE: "palette",
    _CMYK: "CMYK",
    _YCBCR: "YCbCr",
    8: "Lab",
}

_MAX_SAMPLES = 6  # Pillow refuses more, but logs each time that it does
_SIGNED = 2  # sample format
_ALPHA, _COREL_ALPHA = 2, 999  # meanings of an extra sample


@dataclass(frozen=True)
class TiffLayout:
    """What the tags of a TIFF say of its samples."""

    bits: int  # per sample, of the first sample
    num_samples: int  # per pixel
    photometric: int
    extra: tuple[int, ...]  # the meaning of each sample beyond the colours
    compression: int
    is_big_endian: bool
    is_planar: bool  # one plane of samples after the other
    sample_format: int
    fill_order: int
    predictor: int
    subsampling: tuple[int, ...]  # of YCbCr, horizontal and vertical

    @property
    def description(self) -> str:
        color = _COLOR_NAMES.get(self.photometric, f"photometric interpretation {self.photometric}")
        extra = " with extra samples" if self.extra else ""
        return f"{color}{extra}, {self.bits} bits, {'un' if self.compression == NONE else ''}compressed"


def untrusted_layout(layout: TiffLayout) -> str | None:
    """The name of a layout that is not decoded right; `None` if it is, or if Pillow refuses it."""
    if layout.num_samples > _MAX_SAMPLES:
        return f"TIFF with {layout.num_samples:,} samples per pixel"
    if layout.is_planar and layout.num_samples > 1 and not _is_planar_trusted(layout):
        return f"TIFF with separate planes ({layout.description})"
    if layout.sample_format == _SIGNED and not _is_signed_trusted(layout):
        return f"TIFF with signed samples of {layout.bits} bits"
    if layout.compression == NONE:
        if layout.photometric == _YCBCR and layout.subsampling != (1, 1):
            return "uncompressed TIFF with subsampled colours"
        if layout.fill_order == 2 and not _is_reversed_trusted(layout):
            return "uncompressed TIFF with reversed bits"
    has_differences = layout.predictor == _DIFFERENCES and layout.compression in _WITH_PREDICTOR
    if has_differences and layout.bits not in (8, 16, 32):
        return f"TIFF with differences of {layout.bits} bits"
    return None


def _is_planar_trusted(layout: TiffLayout) -> bool:
    bits, extra = layout.bits, layout.extra
    num_colors = _NUM_COLORS.get(layout.photometric)
    if layout.compression == NONE:
        has_alpha = (
            layout.photometric == _RGB
            and layout.num_samples == 4
            and extra in ((), (_ALPHA,), (_COREL_ALPHA,))
        )
        return bits == 8 and layout.fill_order == 1 and (has_alpha or layout.num_samples == num_colors)
    if layout.photometric in _GRAY_OR_PALETTE:
        return bits != 12 and not any(extra)
    if layout.photometric == _YCBCR:
        return layout.subsampling == (1, 1) and not extra
    return (
        bits in (8, 16)
        and layout.num_samples - len(extra) == num_colors
        and (not any(extra) or len(extra) == 1)
    )


def _is_signed_trusted(layout: TiffLayout) -> bool:
    is_swapped = layout.is_big_endian and layout.compression != NONE
    return layout.bits in (16, 32) and not is_swapped


def _is_reversed_trusted(layout: TiffLayout) -> bool:
    if layout.photometric == _PALETTE:
        return layout.bits == 8
    return layout.bits < 8 or layout.photometric != _WHITE_IS_ZERO
