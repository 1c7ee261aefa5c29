"""Files made to break or to stall a decoder give an image or a clear refusal, quickly."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from PIL import Image

from service.errors import ApiError, BadRequest
from service.images.containers import READERS
from service.images.image_file import ImageLimits, read_header
from tests.support.app import Service
from tests.support.broken_files import SEEDS, mutated
from tests.support.image_files import chunk, save, small_tiff, tiff
from tests.support.measuring import measure

LIMITS = ImageLimits(max_image_bytes=20 << 20, max_image_pixels=2**26)
FUZZ_LIMITS = ImageLimits(max_image_bytes=1 << 20, max_image_pixels=4_000_000)
MAX_SECONDS = 2.0
# The most growth of memory, besides the data themselves.
MAX_SMALL_BYTES = 64 << 20
BYTES_PER_PIXEL = 12


def outcome(data: bytes, limits: ImageLimits = LIMITS) -> tuple[int, str]:
    """(200, "") or status and code of the refusal. Other errors, much time or memory fail the test."""
    cost = measure(lambda: attempt(data, limits), max_seconds=MAX_SECONDS)
    status, code, num_pixels = cost.result
    assert cost.seconds < MAX_SECONDS
    assert cost.peak_growth_bytes < MAX_SMALL_BYTES + 2 * len(data) + BYTES_PER_PIXEL * num_pixels
    return status, code


def attempt(data: bytes, limits: ImageLimits) -> tuple[int, str, int]:
    """Status, code, and the number of pixels in the header; 0 if the header is refused."""
    num_pixels = 0
    refusal: ApiError | None = None
    try:
        header = read_header(data, limits)
        num_pixels = header.width * header.height
        rgb = header.decode()
    except ApiError as error:
        refusal = error
    assert num_pixels <= limits.max_image_pixels
    if refusal is None:
        assert rgb.shape == (header.height, header.width, 3)
        return 200, "", num_pixels
    assert refusal.status in (400, 413, 415)
    assert not any(word in refusal.message for word in ("0x", "PIL", "/", "<", "Error"))
    return refusal.status, refusal.code, num_pixels


@pytest.mark.parametrize("name", SEEDS)
def test_whole_files_are_decoded_and_truncated_files_are_decoded_or_called_broken(name: str) -> None:
    data = SEEDS[name]
    assert outcome(data, FUZZ_LIMITS) == (200, "")
    for size in range(0, len(data), 1 + len(data) // 60):
        assert outcome(data[:size], FUZZ_LIMITS)[0] in (200, 400)
    assert outcome(data[: len(data) // 2], FUZZ_LIMITS)[0] in (200, 400)


@pytest.mark.parametrize("name", SEEDS)
def test_mutations_give_an_image_or_a_refusal(name: str) -> None:
    for index in range(250):
        rng = random.Random(f"{name} {index}")
        data = mutated(SEEDS[name], rng)
        if index % 3 == 0:
            data = mutated(data or b"\0", rng)
        outcome(data, FUZZ_LIMITS)


@pytest.mark.parametrize("name", SEEDS)
def test_mutations_are_answered_over_http_as_well(name: str, service: Service) -> None:
    rng = random.Random(name)
    for _ in range(20):
        response = service.embed(mutated(SEEDS[name], rng) or b"\0")
        assert response.status_code in (200, 400, 413, 415), response.text


PNG_HEAD, PNG_REST = SEEDS["png"][:33], SEEDS["png"][33:]
BOMB = zlib.compress(bytes(1 << 20), 9)


@pytest.mark.parametrize(
    "kind_and_body",
    [
        (b"zTXt", b"key\0\0" + BOMB),
        (b"iTXt", b"key\0\1\0\0\0" + zlib.compress(b"\xff" * (1 << 20), 9)),
        (b"iCCP", b"key\0\0" + BOMB),
        (b"tEXt", b"key\0" + b"x" * 1000),
        (b"tEXt", b"transparency\0x"),
        (b"tEXt", b"exif\0x"),
    ],
)
def test_png_text_and_profiles_are_not_inflated(kind_and_body: tuple[bytes, bytes]) -> None:
    extra = chunk(*kind_and_body)
    count = min(15_000, (19 << 20) // len(extra))
    assert outcome(PNG_HEAD + extra * count + PNG_REST) == (200, "")
    assert outcome(PNG_REST[:0] + PNG_HEAD + PNG_REST[:-12] + extra * count + PNG_REST[-12:]) == (200, "")


def test_png_of_a_million_chunks_is_refused() -> None:
    assert outcome(PNG_HEAD + chunk(b"teSt", b"") * 1_000_000 + PNG_REST) == (400, "invalid_image")
    assert outcome(PNG_HEAD + chunk(b"IDAT", b"") * 1_000_000 + PNG_REST) == (400, "invalid_image")


@pytest.mark.parametrize("kind", [b"IDAT", b"tRNS"])
def test_png_of_very_many_chunks_that_are_read_is_refused(kind: bytes) -> None:
    empty = chunk(kind, b"" if kind == b"IDAT" else bytes(6))
    assert outcome(PNG_HEAD + empty * 60_000 + PNG_REST) == (400, "invalid_image")


def test_adjacent_chunks_of_a_png_become_one_part() -> None:
    plain = READERS["PNG"](PNG_HEAD + PNG_REST)
    many = PNG_HEAD + chunk(b"IDAT", b"") * 4000 + chunk(b"teSt", b"") * 1000 + PNG_REST
    stored = READERS["PNG"](many)
    assert len(stored.parts) <= len(plain.parts) + 1
    joined, alone = b"".join(stored.parts), b"".join(plain.parts)
    assert joined == alone[:33] + chunk(b"IDAT", b"") * 4000 + alone[33:]
    assert outcome(many) == (200, "")


def test_png_with_two_headers_or_without_its_palette_is_refused() -> None:
    second = chunk(b"IHDR", struct.pack(">II5B", 9000, 7000, 8, 2, 0, 0, 0))
    assert outcome(PNG_HEAD + second + PNG_REST) == (400, "invalid_image")
    assert outcome(SEEDS["png-palette"].replace(b"PLTE", b"plTE")) == (400, "invalid_image")


def test_png_whose_data_inflate_beyond_its_size_takes_bounded_memory() -> None:
    head = PNG_HEAD[:8] + chunk(b"IHDR", struct.pack(">II5B", 8, 8, 8, 2, 0, 0, 0))
    data = head + chunk(b"IDAT", zlib.compress(bytes(200 << 20), 9)) + chunk(b"IEND", b"")
    assert outcome(data)[0] in (200, 400)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (PNG_HEAD[:8] + chunk(b"IHDR", struct.pack(">II5B", 8192, 8192, 8, 2, 0, 0, 0)) + PNG_REST, 400),
        (
            PNG_HEAD[:8] + chunk(b"IHDR", struct.pack(">II5B", 1 << 30, 1 << 30, 8, 2, 0, 0, 0)) + PNG_REST,
            413,
        ),
        (SEEDS["gif"][:6] + struct.pack("<HH", 65_535, 65_535) + SEEDS["gif"][10:], 413),
        (SEEDS["bmp"][:18] + struct.pack("<ii", 8192, 8192) + SEEDS["bmp"][26:], 400),
        (SEEDS["bmp"][:18] + struct.pack("<ii", 1 << 20, 1 << 20) + SEEDS["bmp"][26:], 413),
        (SEEDS["bmp"][:18] + struct.pack("<ii", -5, 5) + SEEDS["bmp"][26:], 400),
        (b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0\xff\x3f\0\xff\x3f\0" + bytes(50), 413),
        (b"RIFF\xff\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0\xff\x1f\0\xff\x1f\0" + bytes(50), 400),
    ],
)
def test_files_with_fewer_pixels_than_their_header_states_are_refused(data: bytes, status: int) -> None:
    assert outcome(data)[0] == status


def test_jpeg_with_fewer_pixels_than_its_header_states_is_refused() -> None:
    data = SEEDS["jpeg"]
    at = data.index(b"\xff\xc0") + 5
    large = data[:at] + struct.pack(">HH", 8000, 8000) + data[at + 4 :]
    assert outcome(large) == (400, "invalid_image")
    assert outcome(large[:-2] + bytes(125_000))[0] in (200, 400)
    assert outcome(data[:at] + struct.pack(">HH", 65_000, 65_000) + data[at + 4 :]) == (
        413,
        "too_many_pixels",
    )


def test_jpeg_with_millions_of_segments_or_much_junk_is_quick() -> None:
    data = SEEDS["jpeg"]
    for filler in (b"\xff\xfe\0\2", b"\xff", b"\0", b"\xff\0", b"\xff\x01"):
        assert outcome(data[:2] + filler * (10_000_000 // len(filler)) + data[2:])[0] in (200, 400)
    scan = data.index(b"\xff\xda")
    assert outcome(data[:scan] + b"\xff\xfe\0\2" * 4_000_000 + data[scan:])[0] in (200, 400)


def test_progressive_jpeg_is_served_up_to_a_number_of_scans() -> None:
    for side, most in ((6000, 16), (700, 1024)):
        data = save(Image.new("RGB", (side, side)), "JPEG", progressive=True)
        scan = data[data.rindex(b"\xff\xda") : -2]
        missing = most - data.count(b"\xff\xda")
        assert outcome(data[:-2] + scan * missing + data[-2:])[0] == 200
        assert outcome(data[:-2] + scan * (missing + 1) + data[-2:]) == (400, "invalid_image")


def test_scans_are_limited_if_the_first_scan_lacks_a_component() -> None:
    data = save(Image.new("CMYK", (600, 600)), "JPEG")
    at = data.rindex(b"\xff\xda")
    scan = b"\xff\xda\0\x0c\3" + data[at + 5 : at + 11] + b"\0\x3f\0" + data[at + 16 : -2]
    assert outcome(data[:at] + scan * 1100 + data[-2:]) == (400, "invalid_image")
    assert read_header(data[:at] + scan + data[-2:], LIMITS).width == 600


def gif_with(before_frame: bytes) -> bytes:
    data = SEEDS["gif-animated"]
    palette_end = 13 + (3 << (data[10] & 7) + 1)
    return data[:palette_end] + before_frame + data[palette_end:]


def test_gif_with_endless_comments_is_refused() -> None:
    assert outcome(gif_with(b"\x21\xfe" + b"\1x" * 9_000_000 + b"\0")) == (400, "invalid_image")
    assert outcome(gif_with(b"\x21\xfe\1x\0" * 3_000_000)) == (400, "invalid_image")
    assert outcome(gif_with(b"\x21\xfe" + b"\1x" * 1000 + b"\0")) == (200, "")


def test_gif_frame_larger_than_its_screen_is_limited() -> None:
    data = SEEDS["gif"]
    at = data.index(b"\x2c\0\0\0\0")
    huge = data[: at + 5] + struct.pack("<HH", 65_535, 65_535) + data[at + 9 :]
    assert outcome(huge) == (413, "too_many_pixels")
    disposed = b"\x21\xf9\4\x08\0\0\0\0" + data[at : at + 5] + struct.pack("<HH", 9000, 7000) + data[at + 9 :]
    assert outcome(data[:at] + disposed) == (400, "invalid_image")


AT = struct.pack("<I", 264)
LARGE = (19 << 20) // 8 * 8


@pytest.mark.parametrize("tag", [282, 306, 700, 34377, 34675, 34665, 34853, 50838])
def test_tiff_tags_that_pixels_do_not_depend_on_may_have_any_size(tag: int) -> None:
    rationals = small_tiff({tag: (5, LARGE // 8, AT)}, bytes(LARGE))
    assert outcome(rationals) == (200, "")
    directory = struct.pack("<HHHI4s", 1, 42_000, 5, (LARGE - 64) // 8, struct.pack("<I", 300)) + bytes(4)
    assert outcome(small_tiff({tag: (4, 1, AT)}, directory.ljust(LARGE, b"\0"))) == (200, "")


@pytest.mark.parametrize("tag", [256, 258, 273, 279, 320, 338, 339])
def test_tiff_tags_of_absurd_sizes_are_refused(tag: int) -> None:
    assert outcome(small_tiff({tag: (3, LARGE // 2, AT)}, bytes(LARGE))) == (400, "invalid_image")
    assert outcome(small_tiff({tag: (4, 0xFFFFFFFF, AT)})) == (400, "invalid_image")
    assert outcome(small_tiff({tag: (4, 2, b"\xff\xff\xff\xff")})) == (400, "invalid_image")


def test_tiff_with_a_huge_tile_around_a_small_image_is_refused() -> None:
    side = struct.pack("<I", 40_000)
    inflated = zlib.compress(bytes(64 << 20), 9)
    tags = {259: (3, 1, b"\x08\0\0\0"), 322: (4, 1, side), 323: (4, 1, side)}
    tiles = {324: (4, 1, AT), 325: (4, 1, struct.pack("<I", len(inflated)))}
    assert outcome(small_tiff({**tags, **tiles}, inflated)) == (413, "too_many_pixels")


def test_tiff_with_fewer_pixels_than_its_tags_state_is_refused() -> None:
    side = (4, 1, struct.pack("<I", 8000))
    assert outcome(small_tiff({256: side, 257: side})) == (400, "invalid_image")
    huge = (4, 1, b"\xff\xff\xff\xff")
    assert outcome(small_tiff({256: huge, 257: huge})) == (413, "too_many_pixels")
    assert outcome(small_tiff({256: huge, 257: huge, 259: (3, 1, b"\x08\0\0\0")})) == (413, "too_many_pixels")


def test_tiff_directory_at_odd_offsets_is_decoded_or_refused() -> None:
    data = small_tiff({})
    for offset in (0, 4, 8, len(data) - 1, len(data), 0xFFFFFFFF):
        outcome(data[:4] + struct.pack("<I", offset) + data[8:])
    assert outcome(data[:-4] + data[4:8]) == (200, "")


def test_run_length_bmp_of_the_largest_size_served_is_quick() -> None:
    info = struct.pack("<IiiHHIIiiII", 40, 2048, 2048, 1, 8, 1, 0, 0, 0, 2, 0)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 62) + info + b"\0\0\xc8\0\0\xc8\0\0"
    assert outcome(data + b"\1\0\0\0" * 2048)[0] in (200, 400)
    assert outcome(data + b"\1\0" * 500_000)[0] in (200, 400)
    assert outcome(data + b"\1\0" * (9 << 20)) == (415, "unsupported_image_format")


def jpeg_tiff(width: int, height: int, jpeg: bytes, tags: dict[int, tuple[int, ...]]) -> bytes:
    """A TIFF of CMYK, in one strip unless the tags say otherwise."""
    return tiff(width, height, jpeg, {258: (8,) * 4, 259: (7,), 262: (5,), 277: (4,), **tags})


def cmyk_jpeg(width: int, height: int) -> bytes:
    return save(Image.new("CMYK", (width, height), (9, 99, 0, 0)), "JPEG", progressive=True, subsampling=0)


@pytest.mark.parametrize(
    ("size", "tags"),
    [
        ((64, 64), {}),
        ((4096, 64), {}),
        ((4096, 64), {278: (4096,)}),
        ((64, 4096), {}),
        ((4096, 64), {322: (4096,), 323: (64,)}),
        ((4096, 64), {322: (4096,)}),
    ],
)
def test_jpeg_in_tiff_larger_than_its_strip_or_tile_is_refused(
    size: tuple[int, int], tags: dict[int, tuple[int, ...]]
) -> None:
    data = jpeg_tiff(*size, cmyk_jpeg(4096, 4096), tags)
    assert outcome(data) == (400, "invalid_image")
    refused_unread(data)


def refused_unread(data: bytes) -> None:
    with pytest.raises(BadRequest):
        read_header(data, LIMITS)


def test_last_strip_of_jpegs_in_tiff_may_be_as_tall_as_the_others() -> None:
    jpeg = cmyk_jpeg(64, 32)
    strips = {273: (8, 8 + len(jpeg)), 279: (len(jpeg), len(jpeg)), 278: (32,)}
    assert outcome(jpeg_tiff(64, 40, jpeg * 2, strips)) == (200, "")
    shared = {**strips, 273: (8, 8)}
    assert outcome(jpeg_tiff(64, 40, jpeg, shared)) == (200, "")


def test_jpeg_in_tiff_is_served_up_to_a_number_of_scans() -> None:
    data = save(Image.new("L", (6000, 6000)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    missing = 16 - data.count(b"\xff\xda")
    for num_more, expected in ((missing, (200, "")), (missing + 1, (400, "invalid_image"))):
        jpeg = data[:-2] + scan * num_more + data[-2:]
        assert outcome(tiff(6000, 6000, jpeg, {258: (8,), 259: (7,), 262: (1,)})) == expected


def test_jpeg_in_tiff_with_fewer_pixels_than_its_header_states_is_refused() -> None:
    jpeg = save(Image.new("L", (64, 64)), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg = jpeg[:at] + struct.pack(">HH", 8000, 8000) + jpeg[at + 4 :]
    assert outcome(tiff(8000, 8000, jpeg, {258: (8,), 259: (7,), 262: (1,)})) == (400, "invalid_image")


@pytest.mark.parametrize("num_segments", [1, 100])
def test_very_many_jpegs_in_tiff_are_quick(num_segments: int) -> None:
    gray = save(Image.new("L", (16, 16)), "JPEG", optimize=True)
    jpeg = gray[:2] + b"\xff\xfe\0\2" * num_segments + gray[2:]
    count = min(65_536, (16 << 20) // len(jpeg))
    places = {324: tuple(range(8, 8 + count * len(jpeg), len(jpeg))), 325: (len(jpeg),) * count}
    tags = {258: (8,), 259: (7,), 262: (1,), 322: (16,), 323: (16,), **places}
    data = tiff(16, 16 * count, jpeg * count, tags)
    data = data.replace(struct.pack("<HHII", 273, 4, 1, 8), struct.pack("<HHII", 700, 4, 1, 8))
    data = data.replace(struct.pack("<HHI", 279, 4, 1), struct.pack("<HHI", 701, 4, 1))
    assert outcome(data)[0] in (200, 400)


@pytest.mark.parametrize("tag", [259, 277, 322, 323])
@pytest.mark.parametrize("type_", [8, 9, 16])
def test_tiff_numbers_of_types_that_only_decoders_read_are_refused(tag: int, type_: int) -> None:
    assert outcome(small_tiff({tag: (type_, 1, b"\x10\0\0\0")}, bytes(64))) == (400, "invalid_image")


@pytest.mark.parametrize(
    "places",
    [
        {279: (3, 0, b"")},  # no sizes
        {324: (4, 1, AT), 325: (4, 1, AT)},  # strips and tiles
        {324: (4, 1, AT)},
        {273: (4, 2, AT)},  # more offsets than sizes
        {279: (9, 1, b"\1\0\0\0")},  # a signed size
    ],
)
def test_jpegs_in_tiff_with_ambiguous_places_are_refused(
    places: dict[int, tuple[int, int, bytes]],
) -> None:
    jpeg = save(Image.new("L", (16, 16)), "JPEG")
    size = struct.pack("<I", len(jpeg))
    plain = {259: (3, 1, b"\7\0\0\0"), 273: (4, 1, AT), 279: (4, 1, size)}
    assert outcome(small_tiff(plain, jpeg)) == (200, "")
    refused_unread(small_tiff({**plain, **places}, jpeg))


def test_jpegs_in_tiff_that_overlap_are_refused() -> None:
    jpeg = cmyk_jpeg(64, 32) + bytes(500)
    size = len(jpeg)
    apart = {273: (8, 8 + size), 279: (size, size), 278: (32,)}
    assert outcome(jpeg_tiff(64, 64, jpeg * 2, apart)) == (200, "")
    refused_unread(jpeg_tiff(64, 64, jpeg, {**apart, 273: (8, 9), 279: (size, size - 1)}))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_truncated_jpeg_in_tiff_is_refused(share: float) -> None:
    noise = save(Image.effect_noise((128, 96), 60), "JPEG")
    tags: dict[int, tuple[int, ...]] = {258: (8,), 259: (7,), 262: (1,), 277: (1,), 278: (96,)}
    assert outcome(tiff(128, 96, noise, tags)) == (200, "")
    assert outcome(tiff(128, 96, noise[: int(len(noise) * share)], tags)) == (400, "invalid_image")


def test_jpeg_in_tiff_may_have_bytes_after_its_end() -> None:
    pixels = save(Image.effect_noise((128, 96), 60), "JPEG") + b"\0\0\0"
    assert outcome(tiff(128, 96, pixels, {258: (8,), 259: (7,), 262: (1,), 277: (1,), 278: (96,)})) == (
        200,
        "",
    )
