"""The largest size that the frames in AV1 data may have, from their headers.

Follows the AV1 specification, 5.5 and 5.9, up to the sizes. Knows nothing of files or limits. Raises
`ValueError` for broken data.
"""

from __future__ import annotations

from dataclasses import dataclass

_SEQUENCE, _FRAME_HEADER, _FRAME = 1, 3, 6
_MAX_FRAMES = 4  # of a layered image; each frame may stay in memory for the following frames
_MAX_UNITS = 4096  # real images have a few, with tile groups some dozens
_MAX_HEADER_BYTES = 1024
_KEY_FRAME, _SWITCH_FRAME = 0, 3
_SELECTED_BY_FRAME = 2


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._number = int.from_bytes(data, "big")
        self._num_left = 8 * len(data)

    def take(self, count: int) -> int:
        self._num_left -= count
        if self._num_left < 0:
            raise ValueError("truncated bits")
        return self._number >> self._num_left & (1 << count) - 1

    def skip_variable(self) -> None:
        """Skips a number of variable length: some zeros, a one, and as many bits as there were zeros."""
        num_zeros = 0
        while not self.take(1):
            num_zeros += 1
        self.take(num_zeros)


@dataclass(frozen=True)
class _Timing:
    delay_bits: int = 0  # 0: no decoder model
    time_bits: int = 0  # of the presentation time of a frame; 0: frames have none


@dataclass(frozen=True)
class _Sequence:
    max_pixels: int  # of frames without a size of their own
    max_own_pixels: int  # of frames with a size of their own: the largest that its bits can hold
    is_still: bool  # a still picture with reduced headers, whose frames have no size of their own
    time_bits: int
    id_bits: int
    screen_content: int  # 0, 1 or selected by each frame
    integer_vectors: int


def max_frame_pixels(data: bytes) -> int:
    """The most pixels that the largest frame may have."""
    sequence: _Sequence | None = None
    num_frames, most = 0, 0
    for kind, start, end in _units(data):
        header = data[start : min(end, start + _MAX_HEADER_BYTES)]
        if kind == _SEQUENCE:
            sequence = _read_sequence(_Bits(header))
        elif kind in (_FRAME_HEADER, _FRAME):
            if sequence is None:
                raise ValueError("a frame without a sequence")
            num_frames += 1
            has_own_size = not sequence.is_still and _has_own_size(_Bits(header), sequence)
            most = max(most, sequence.max_own_pixels if has_own_size else sequence.max_pixels)
    if not 0 < num_frames <= _MAX_FRAMES:
        raise ValueError("no frame, or too many frames")
    return most


def _units(data: bytes) -> list[tuple[int, int, int]]:
    """(type, start, end) of each open bitstream unit."""
    units: list[tuple[int, int, int]] = []
    at = 0
    while at < len(data):
        if len(units) == _MAX_UNITS:
            raise ValueError("too many units")
        head = data[at]
        at += 2 if head & 4 else 1
        end = len(data)
        if head & 2:
            size, at = _leb128(data, at)
            end = at + size
        if end > len(data):
            raise ValueError("a truncated unit")
        units.append((head >> 3 & 15, at, end))
        at = end
    return units


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for index, byte in enumerate(data[at : at + 8]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    raise ValueError("a broken size")


def _read_sequence(bits: _Bits) -> _Sequence:
    bits.take(4)  # profile, still picture
    is_still = bits.take(1) == 1
    timing = _Timing()
    if is_still:
        bits.take(5)
    else:
        timing = _read_timing(bits)
        _skip_operating_points(bits, timing)
    width_bits, height_bits = bits.take(4) + 1, bits.take(4) + 1
    max_pixels = (bits.take(width_bits) + 1) * (bits.take(height_bits) + 1)
    id_bits = 0
    if not is_still and bits.take(1):
        id_bits = bits.take(4) + bits.take(3) + 3
    screen_content = integer_vectors = _SELECTED_BY_FRAME
    if not is_still:
        bits.take(7)  # large blocks, two kinds of filters, four kinds of prediction
        if bits.take(1):
            bits.take(2)  # tools that depend on the order of frames
        screen_content = _choice(bits)
        integer_vectors = _choice(bits) if screen_content else _SELECTED_BY_FRAME
    own = 1 << width_bits + height_bits
    return _Sequence(max_pixels, own, is_still, timing.time_bits, id_bits, screen_content, integer_vectors)


def _choice(bits: _Bits) -> int:
    return _SELECTED_BY_FRAME if bits.take(1) else bits.take(1)


def _read_timing(bits: _Bits) -> _Timing:
    if not bits.take(1):
        return _Timing()
    bits.take(64)  # ticks
    is_even = bits.take(1)
    if is_even:
        bits.skip_variable()
    if not bits.take(1):
        return _Timing()
    delay_bits = bits.take(5) + 1
    bits.take(37)  # ticks, bits of the time of removal
    time_bits = bits.take(5) + 1
    return _Timing(delay_bits, 0 if is_even else time_bits)


def _skip_operating_points(bits: _Bits, timing: _Timing) -> None:
    has_display_delay = bits.take(1)
    for _ in range(bits.take(5) + 1):
        bits.take(12)
        if bits.take(5) > 7:
            bits.take(1)
        if timing.delay_bits and bits.take(1):
            bits.take(2 * timing.delay_bits + 1)
        if has_display_delay and bits.take(1):
            bits.take(4)


def _has_own_size(bits: _Bits, sequence: _Sequence) -> bool:
    if bits.take(1):  # an earlier frame is shown again
        return False
    kind, is_shown = bits.take(2), bits.take(1)
    if is_shown:
        bits.take(sequence.time_bits)
    else:
        bits.take(1)  # may be shown later
    if kind != _SWITCH_FRAME and not (kind == _KEY_FRAME and is_shown):
        bits.take(1)  # resilient to errors
    bits.take(1)  # fixed probabilities
    screen_content = sequence.screen_content
    if screen_content == _SELECTED_BY_FRAME:
        screen_content = bits.take(1)
    if screen_content and sequence.integer_vectors == _SELECTED_BY_FRAME:
        bits.take(1)
    bits.take(sequence.id_bits)
    return kind == _SWITCH_FRAME or bits.take(1) == 1
