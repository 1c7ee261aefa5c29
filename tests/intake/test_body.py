import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.errors import ApiError, BadRequest, BodyTimeout, TooLarge, UnsupportedMedia
from service.intake.body import embed_reader, read_body
from service.intake.content_type import parse_content_type
from service.intake.embed_body import BodyLimits, EmbedBody
from tests.support.bodies import LIMITS, MULTIPART, T, Ts, image_part, multipart, read, run_inline, stream


class LeftError(Exception):
    """The client left."""


@pytest.mark.parametrize(
    "content_type",
    ["image/jpeg", "IMAGE/PNG", "image/svg+xml; charset=utf-8", "application/octet-stream", "image/whatever"],
)
def test_raw_body_is_one_image(content_type: str) -> None:
    body = read(content_type, b"\xff\xd8", b"", b"\x00\xff")
    assert body.images == (b"\xff\xd8\x00\xff",)
    assert body.options == {}


@pytest.mark.parametrize("content_type", ["image/jpeg", "application/json", MULTIPART])
def test_empty_body_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(content_type, b"")
    assert caught.value.code == "empty_input"


@pytest.mark.parametrize(
    ("content_type", "named"),
    [
        (None, "missing"),
        ("", "missing"),
        ("application/x-www-form-urlencoded", "application/x-www-form-urlencoded"),
        ("text/plain", "text/plain"),
        ("application/vnd.api+json", "application/vnd.api+json"),
        ("multipart/mixed; boundary=x", "multipart/mixed"),
        ("imagejpeg", "imagejpeg"),
        (";;;=", "given"),
        ("caf\xe9/\u20ac", "caf\\xe9/?"),
    ],
)
def test_other_content_types_are_refused_with_a_hint(content_type: str | None, named: str) -> None:
    with pytest.raises(UnsupportedMedia) as caught:
        read(content_type, b"x")
    assert caught.value.code == "unsupported_content_type"
    assert named in caught.value.message
    assert "-H 'Content-Type: image/jpeg'" in caught.value.message


def read_from(chunks: AsyncIterator[bytes], content_type: str, limits: BodyLimits = LIMITS) -> EmbedBody:
    """Reads a body of `/embed` from a stream."""
    reader = embed_reader(parse_content_type(content_type), limits)
    return asyncio.run(read_body(reader, chunks, limits, run_inline))


def _counted(chunk: bytes, counts: list[int]) -> AsyncIterator[bytes]:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            counts[0] += 1
            yield chunk

    return endless()


@pytest.mark.parametrize(
    ("content_type", "chunk", "code", "num_chunks"),
    [
        ("image/jpeg", b"x" * 300, "image_too_large", 4),
        ("application/json", b" " * 75_000, "body_too_large", 5),
        (MULTIPART, image_part(b"x" * 300), "too_many_images", 4),
        (MULTIPART, image_part(b"x" * 1001), "image_too_large", 1),
    ],
)
def test_endless_bodies_are_refused_at_the_chunk_that_passes_a_limit(
    content_type: str, chunk: bytes, code: str, num_chunks: int
) -> None:
    counts = [0]
    with pytest.raises(TooLarge) as caught:
        read_from(_counted(chunk, counts), content_type)
    assert caught.value.code == code
    assert counts == [num_chunks]


def test_limits_are_inclusive() -> None:
    limits = replace(LIMITS, max_body_bytes=1000)
    assert read("image/png", b"x" * 600, b"x" * 400, limits=limits).images == (b"x" * 1000,)
    with pytest.raises(TooLarge) as caught:
        read("image/png", b"x" * 1001, limits=replace(limits, max_body_bytes=2000))
    assert (caught.value.code, caught.value.param) == ("image_too_large", "images[0]")
    assert "1000" in caught.value.message


def test_body_that_stalls_times_out() -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    limits = replace(LIMITS, timeout_s=0.02)
    with pytest.raises(BodyTimeout) as caught:
        read_from(stalled(), "image/png", limits)
    assert caught.value.status == 408
    assert "0.02 s" in caught.value.message


@pytest.mark.parametrize("error", [LeftError(), TimeoutError("not ours"), asyncio.CancelledError()])
@pytest.mark.parametrize("content_type", ["image/jpeg", "application/json", MULTIPART])
def test_errors_of_the_stream_pass_through(content_type: str, error: BaseException) -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"--"
        raise error

    with pytest.raises(type(error)) as caught:
        read_from(failing(), content_type)
    assert not isinstance(caught.value, ApiError)


@pytest.mark.parametrize(
    ("content_type", "body", "num_hops"),
    [
        ("application/json", b'{"images": "AAAA"}', 0),
        ("application/json", b" " * 2**16 + b'{"images": "AAAA"}', 1),
        ("image/png", bytes(2**20), 0),
        ("image/png", bytes(2**20 + 1), 1),
        (MULTIPART, multipart(image_part(bytes(2**20))), 0),
        (MULTIPART, multipart(image_part(bytes(2**19)), image_part(bytes(2**19 + 1))), 1),
    ],
)
def test_only_large_bodies_leave_the_event_loop(content_type: str, body: bytes, num_hops: int) -> None:
    limits = replace(LIMITS, max_body_bytes=2**22, max_image_bytes=2**22)
    calls: list[Any] = []

    async def main() -> tuple[object, ...]:
        with ThreadPoolExecutor(1) as pool:

            async def run_blocking(fn: Callable[[*Ts], T], /, *args: *Ts) -> T:
                calls.append(fn)
                return await asyncio.get_running_loop().run_in_executor(pool, fn, *args)

            chunks = stream([body[:1000], body[1000:]])
            reader = embed_reader(parse_content_type(content_type), limits)
            return (await read_body(reader, chunks, limits, run_blocking)).images

    assert asyncio.run(main()) == read(content_type, body, limits=limits).images
    assert len(calls) == num_hops


_JSON_TOKENS = [
    *b'{"images": [ ] { } " , : "data" "url" 1e9 NaN \\ud800 = QQ== data:;base64, http:// %'.split(),
    *(b'"dtype":', b"true", b"null", b"\xef\xbb\xbf", b"\xff", b"\n"),
]
_MULTIPART_TOKENS = [
    *b"--xYz--7 -- Content-Disposition: form-data ;name=dtype ;filename=a ;filename*=utf-8''a mean".split(),
    *(b'"', b"\\", b"\r\n", b"\r", b"\n", b"Content-Type: image/png", b":", b" ", b"\xff", b"\0"),
    *(image_part(b"x"), multipart(image_part(b"x"))),
]


@settings(derandomize=True, max_examples=400, deadline=None)
@given(
    content_type=st.sampled_from(["image/png", "application/json", MULTIPART]) | st.text(max_size=60),
    chunks=st.lists(st.binary(max_size=60), max_size=5)
    | st.lists(st.sampled_from(_JSON_TOKENS), max_size=12)
    | st.lists(st.sampled_from(_MULTIPART_TOKENS), max_size=12),
)
@example(content_type="application/json", chunks=[b'{"\\ud800": 1}'])
@example(content_type="application/json", chunks=[b'{"images": "\\ud800"}'])
@example(content_type="application/json", chunks=[b'{"images": ["data:,\\ud800"]}'])
@example(content_type="application/json", chunks=[b"1" * 5000])
def test_no_body_raises_anything_but_an_api_error(content_type: str, chunks: list[bytes]) -> None:
    try:
        body = read(content_type, *chunks)
    except ApiError as error:
        str(error.body()).encode()  # fails if the error cannot be sent
    else:
        assert body.images
        assert all(body.images)


def test_large_chunk_does_not_block_the_event_loop() -> None:
    body = multipart(image_part(b"\r\n--xYz-" * 100)) + bytes(200_000)
    turns = 0

    async def main() -> None:
        nonlocal turns

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        reader = embed_reader(parse_content_type(MULTIPART), LIMITS)
        await read_body(reader, stream([body]), LIMITS, run_inline)
        task.cancel()

    asyncio.run(main())
    assert turns >= 3
