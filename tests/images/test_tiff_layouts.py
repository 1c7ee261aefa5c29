"""Every layout of the samples of a TIFF is decoded right or refused by name.

The files are written, and the expected pixels computed, without any image library.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from service.errors import ApiError, UnsupportedMedia
from service.images.image_file import ImageLimits, read_header
from tests.support.image_files import TiffLayout, save, tiff, tiff_of

LIMITS = ImageLimits(max_image_bytes=1 << 20, max_image_pixels=1 << 20)
HEIGHT, WIDTH = 19, 21
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8
NUM_COLORS = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, PALETTE: 1, CMYK: 4, YCBCR: 3, LAB: 3}
IGNORED, PREMULTIPLIED, ALPHA, COREL_ALPHA = (0,), (1,), (2,), (999,)
EXTRAS: tuple[tuple[int, ...], ...] = (
    *((), IGNORED, PREMULTIPLIED, ALPHA, COREL_ALPHA),
    *((0, 0), (2, 0), (1, 0)),
)
LZW, DEFLATE, PACKBITS = 5, 8, 32773
Array = npt.NDArray[Any]


def samples(layout: TiffLayout) -> Array:
    """[height, width, samples] with slopes of every sample, premultiplied where the layout says so."""
    num_colors = NUM_COLORS[layout.photometric]
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    slopes = [(x * 7 + y * 3 + index * 50) % 256 for index in range(num_colors + len(layout.extra))]
    array: Array = np.rint(np.stack(slopes, 2) / 255 * (2**layout.bits - 1))
    if layout.extra[:1] == PREMULTIPLIED:
        array[..., :num_colors] = np.minimum(array[..., :num_colors], array[..., num_colors, np.newaxis])
    return array


def expected(array: Array, layout: TiffLayout) -> Array:
    """[height, width, 3] over white, from 0 to 255."""
    scaled: Array = array / (2**layout.bits - 1) * 255
    num_colors = NUM_COLORS[layout.photometric]
    rgb: Array = colors(scaled[..., :num_colors], array, layout)
    alpha = scaled[..., num_colors, np.newaxis] if layout.extra else scaled
    if layout.extra[:1] == PREMULTIPLIED:
        rgb = np.minimum(rgb + 255 - alpha, 255)
    if layout.extra[:1] in (ALPHA, COREL_ALPHA):
        rgb = rgb * alpha / 255 + 255 - alpha
    return rgb


def colors(scaled: Array, array: Array, layout: TiffLayout) -> Array:
    if layout.photometric == PALETTE:
        shades = np.arange(0, 1 << 16, (1 << 16) >> layout.bits) // 256
        index = array[..., 0].astype(int)
        return np.dstack([shades[index], shades[::-1][index], shades[index]])
    if layout.photometric == CMYK:
        inks: Array = (255 - scaled[..., :3]) * (255 - scaled[..., 3:]) / 255
        return inks
    if layout.photometric == YCBCR:
        return rgb_of_ycbcr(*np.moveaxis(scaled, 2, 0))
    if layout.photometric == RGB:
        return scaled
    gray: Array = np.repeat(scaled, 3, 2)
    return 255 - gray if layout.photometric == WHITE_IS_ZERO else gray


def rgb_of_ycbcr(luma: Array, blue: Array, red: Array) -> Array:
    red, blue = red - 128.0, blue - 128.0
    rgb: Array = np.dstack([luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue])
    return np.clip(rgb, 0, 255)


def is_right(data: bytes, rgb: Array) -> bool:
    """False: refused by name. Any other error and other pixels fail the test."""
    try:
        decoded = read_header(data, LIMITS).decode()
    except UnsupportedMedia:
        return False
    assert np.abs(decoded - rgb).max() <= 3
    return True


def variants(bits: int, photometric: int, is_planar: bool, is_compressed: bool) -> Iterator[TiffLayout]:
    compressions = (LZW, DEFLATE, PACKBITS) if is_compressed else (1,)
    for extra, compression, order, tile, fill_order, has_predictor in itertools.product(
        EXTRAS, compressions, "<>", (0, 16), (1, 2), (False, True)
    ):
        if has_predictor and (bits not in (8, 16, 32) or compression not in (LZW, DEFLATE)):
            continue
        if tile and (has_predictor or fill_order == 2):
            continue
        yield TiffLayout(
            bits, photometric, extra, is_planar, compression, order, 10, tile, has_predictor, 1, fill_order
        )


NO_EXTRA: set[tuple[int, ...]] = {()}
SKIPPED = {(), IGNORED, (0, 0)}
WITH_ALPHA = {(), IGNORED, PREMULTIPLIED, ALPHA}
# The extra samples that are served: in one plane; in separate planes; in separate planes that are compressed.
GRAY = NO_EXTRA, NO_EXTRA, SKIPPED
SERVED: dict[tuple[int, int], tuple[set[tuple[int, ...]], ...]] = {
    **{(WHITE_IS_ZERO, bits): GRAY for bits in (1, 2, 4, 8, 16)},
    **{(BLACK_IS_ZERO, bits): GRAY for bits in (1, 2, 4, 16)},
    (BLACK_IS_ZERO, 8): (WITH_ALPHA, NO_EXTRA, SKIPPED),
    (BLACK_IS_ZERO, 12): (NO_EXTRA, NO_EXTRA, NO_EXTRA),
    (RGB, 8): (set(EXTRAS), {(), ALPHA, COREL_ALPHA}, {*SKIPPED, *WITH_ALPHA, COREL_ALPHA}),
    (RGB, 16): (WITH_ALPHA, set(), {*SKIPPED, *WITH_ALPHA}),
    **{(PALETTE, bits): GRAY for bits in (1, 2, 4)},
    (PALETTE, 8): ({(), IGNORED, ALPHA}, NO_EXTRA, SKIPPED),
    (CMYK, 8): (SKIPPED, NO_EXTRA, SKIPPED),
    (CMYK, 16): (NO_EXTRA, set(), SKIPPED),
    (YCBCR, 8): (NO_EXTRA, set(), NO_EXTRA),
}


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("is_planar", [False, True])
@pytest.mark.parametrize("photometric", [WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16, 32])
def test_every_layout_is_right_or_refused(
    bits: int, photometric: int, is_planar: bool, is_compressed: bool
) -> None:
    if photometric == PALETTE and bits > 8:
        return
    served = set()
    for layout in variants(bits, photometric, is_planar, is_compressed):
        array = samples(layout)
        try:
            if is_right(tiff_of(array, layout), expected(array, layout)):
                served.add(layout.extra)
        except AssertionError as error:
            raise AssertionError(layout) from error
    expected_extras = SERVED.get((photometric, bits), (set(), set(), set()))
    assert served == expected_extras[is_planar + (is_planar and is_compressed)]


def gray_of(values: Array, layout: TiffLayout) -> tuple[bytes, Array]:
    array = values.astype(float).reshape(HEIGHT, WIDTH, 1)
    return tiff_of(array, layout), np.repeat(array / 257, 3, 2)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compression", [1, LZW, DEFLATE, PACKBITS])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_signed_gray_is_right_or_refused(bits: int, compression: int, order: str) -> None:
    layout = TiffLayout(bits, BLACK_IS_ZERO, compression=compression, order=order, sample_format=2)
    values = np.arange(HEIGHT * WIDTH) * 82.0 if bits > 8 else np.arange(HEIGHT * WIDTH) % 128.0
    is_swapped = order == ">" and compression != 1
    assert is_right(*gray_of(values, layout)) == (bits > 8 and not is_swapped)
    assert not is_right(*gray_of(np.full(HEIGHT * WIDTH, 2.0**bits - 5), layout))  # −5


def test_color_and_alpha_in_separate_planes_without_the_tag_for_alpha_are_right_or_refused() -> None:
    for bits, compression in itertools.product((8, 16), (1, LZW, DEFLATE)):
        with_tag = TiffLayout(bits, RGB, ALPHA, is_planar=True, compression=compression)
        array = samples(with_tag)
        data = tiff_of(array, replace(with_tag, extra=()))
        assert is_right(data, expected(array, with_tag)) == ((bits, compression) == (8, 1))


def test_lab_in_separate_planes_is_refused() -> None:
    for compression in (1, LZW, DEFLATE):
        lab = TiffLayout(8, LAB, is_planar=True, compression=compression)
        assert not is_right(tiff_of(samples(lab), lab), np.zeros(3))


def test_subsampled_colors_are_right_or_refused() -> None:
    y, x = np.mgrid[:32, :48]
    luma, (blue, red) = (x * 4 + y * 2) % 200 + 20, (x[::2, ::2] + 60, y[::2, ::2] * 2 + 70)
    blocks = luma.reshape(16, 2, 24, 2).transpose(0, 2, 1, 3).reshape(16, 24, 4)
    body = np.dstack([blocks, blue, red]).astype(np.uint8).tobytes()
    doubled = (np.kron(plane, np.ones((2, 2))) for plane in (blue, red))
    rgb = rgb_of_ycbcr(luma, *doubled)
    common: dict[int, tuple[int, ...]] = {258: (8,) * 3, 262: (YCBCR,), 277: (3,), 278: (32,)}
    for subsampling in ((2, 2), ()):  # (2, 2) is the default
        tags = {**common, 530: subsampling}
        assert is_right(tiff(48, 32, zlib.compress(body), {**tags, 259: (DEFLATE,)}), rgb)
        assert not is_right(tiff(48, 32, body, tags), rgb)


@pytest.mark.parametrize(
    ("photometric", "extra", "is_served"),
    [
        (RGB, (), True),
        (RGB, ALPHA, True),
        (CMYK, (), True),
        (YCBCR, (), True),
        (BLACK_IS_ZERO, ALPHA, False),
    ],
)
def test_planes_that_are_jpegs_are_right_or_refused(
    photometric: int, extra: tuple[int, ...], is_served: bool
) -> None:
    layout = TiffLayout(8, photometric, extra)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    array = np.stack(
        [x * 4.0 + y * 3 + 9 * index for index in range(NUM_COLORS[photometric] + len(extra))], 2
    )
    planes = [
        save(Image.fromarray(plane.astype(np.uint8)), "JPEG", quality=100)
        for plane in np.moveaxis(array, 2, 0)
    ]
    tags: dict[int, tuple[int, ...]] = {
        258: (8,) * len(planes),
        259: (7,),
        262: (photometric,),
        273: tuple(map(int, np.cumsum([8, *map(len, planes)])[:-1])),
        277: (len(planes),),
        278: (HEIGHT,),
        279: tuple(map(len, planes)),
        284: (2,),
        338: extra,
        530: (1, 1),
    }
    assert is_right(tiff(WIDTH, HEIGHT, b"".join(planes), tags), expected(array, layout)) == is_served


def test_a_refused_layout_is_named() -> None:
    layout = TiffLayout(16, RGB, is_planar=True)
    with pytest.raises(ApiError, match=r"TIFF with separate planes \(RGB, 16 bits, uncompressed\)"):
        read_header(tiff_of(samples(layout), layout), LIMITS)


def test_many_samples_are_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    layout = TiffLayout(8, RGB, (0,) * 4)
    assert not is_right(tiff_of(samples(layout), layout), np.zeros(3))
    assert not caplog.records


@pytest.mark.parametrize("bits", [1, 2, 4, 12])
def test_differences_of_samples_that_are_no_bytes_are_refused(bits: int) -> None:
    layout = TiffLayout(bits, BLACK_IS_ZERO, compression=DEFLATE)
    data = tiff_of(samples(layout), layout)
    assert is_right(data, expected(samples(layout), layout))
    number = (317).to_bytes(2, "little") + b"\4\0\1\0\0\0"
    assert not is_right(data.replace(number + b"\1", number + b"\2"), np.zeros(3))
