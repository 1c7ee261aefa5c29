"""One attempt to decode a hostile file, with its time and memory."""

from __future__ import annotations

from service.errors import ApiError
from service.images.image_file import ImageLimits, read_header
from tests.support.measuring import measure

LIMITS = ImageLimits(max_image_bytes=20 << 20, max_image_pixels=2**26)


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
