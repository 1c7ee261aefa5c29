import pytest

from service.errors import ApiError, BadRequest, TooLarge
from service.intake.embed_body import EmbedBody
from service.intake.multipart import MultipartReader
from tests.support.bodies import BOUNDARY, LIMITS, MULTIPART, image_part, multipart, option_part, part, read
from tests.support.measuring import growth

BODY = multipart(
    option_part("pooling", b"none"),
    image_part(b"first\r\n--xYz-\r\n--xYz--\r\r\n-"),
    option_part("deepstack", b"true"),
    image_part(b"\r\nsecond\r\n"),
)
EXPECTED = EmbedBody(
    (b"first\r\n--xYz-\r\n--xYz--\r\r\n-", b"\r\nsecond\r\n"), {"pooling": "none", "deepstack": "true"}
)


def test_images_come_in_order_and_options_by_name() -> None:
    assert read(MULTIPART, BODY) == EXPECTED


@pytest.mark.parametrize("split", range(1, len(BODY)))
def test_body_may_be_split_at_any_byte(split: int) -> None:
    assert read(MULTIPART, BODY[:split], BODY[split:]) == EXPECTED


def test_preamble_is_ignored_at_any_split() -> None:
    body = b"This is a form.\r\n--xYz\r\n-\r\n" + BODY
    for split in range(1, 60):
        assert read(MULTIPART, body[:split], body[split:]) == EXPECTED


def test_body_may_arrive_byte_by_byte() -> None:
    assert read(MULTIPART, *(BODY[i : i + 1] for i in range(len(BODY)))) == EXPECTED


@pytest.mark.parametrize(
    "headers",
    [
        b'Content-Disposition: form-data; name="x"; filename="photo; a.jpg"',
        b'Content-Disposition: form-data; name="x"; filename="' + b"&#26412;" * 60 + b'.jpg"',
        b'Content-Disposition: form-data; name="a\\"; "; filename*=x; y="open',
        b'Content-Disposition: form-data; name="pooling"; filename=""',
        b"CONTENT-DISPOSITION: form-data; name=pooling; FileName=a.jpg\r\nContent-Type: text/plain",
        b"Content-Disposition: form-data; name=\"x\"; filename*=UTF-8''na%C3%AFve.jpg",
        b"Content-Disposition: form-data; name=\"x\"; filename*0*=UTF-8''na; filename*1*=ive.jpg",
        b'Content-Disposition: form-data; name="pooling"\r\nContent-Type: image/webp',
        b'Content-Disposition: form-data; name="pooling"\r\ncontent-type: Application/Octet-Stream; x=y',
        b"Content-Type: image/jpeg\r\nContent-Transfer-Encoding: Binary",
    ],
)
def test_part_with_a_file_name_or_an_image_type_is_an_image(headers: bytes) -> None:
    assert read(MULTIPART, multipart(part(headers, b"\0"))) == EmbedBody((b"\0",), {})


NO_FILE = part(b'Content-Disposition: form-data; name="x"; filename=""\r\nContent-Type: image/png', b"")
BUTTON = part(b'Content-Disposition: form-data; name="submit"', b"Upload image")


def test_empty_file_inputs_and_the_submit_button_of_a_page_are_ignored() -> None:
    body = multipart(
        NO_FILE,
        image_part(b"1"),
        NO_FILE,
        image_part(b"2"),
        option_part("normalize", b"False"),
        image_part(b"3"),
        NO_FILE,  # the request has its 3 images already, and this part is not an image
        BUTTON,
    )
    expected = EmbedBody((b"1", b"2", b"3"), {"normalize": "False"})
    for split in range(1, len(body)):
        assert read(MULTIPART, body[:split], body[split:]) == expected


@pytest.mark.parametrize(
    "name",
    ["submit", "Submit", "btnSubmit", "submit.x", "ctl00$btnUpload", "Button1", "send", "UPLOAD", "commit"],
)
def test_text_part_with_the_name_of_a_button_is_ignored(name: str) -> None:
    body = multipart(image_part(b"x"), option_part(name, b"Go"), option_part(name, b""))
    assert read(MULTIPART, body) == EmbedBody((b"x",), {})


def test_file_under_the_name_of_a_button_is_an_image() -> None:
    headers = b'Content-Disposition: form-data; name="upload"; filename="a.jpg"'
    assert read(MULTIPART, multipart(part(headers, b"x"))).images == (b"x",)


def test_file_input_with_bytes_and_no_name_counts_as_an_image() -> None:
    unnamed = part(b'Content-Disposition: form-data; name="x"; filename=""', b"x")
    assert read(MULTIPART, multipart(unnamed)).images == (b"x",)
    with pytest.raises(TooLarge) as caught:
        read(MULTIPART, multipart(*[image_part(b"x")] * 3, unnamed))
    assert caught.value.code == "too_many_images"


@pytest.mark.parametrize("ignored", [NO_FILE, BUTTON])
def test_ignored_parts_have_a_limit(ignored: bytes) -> None:
    assert read(MULTIPART, multipart(*[ignored] * 64, image_part(b"x"))).images == (b"x",)
    with pytest.raises(BadRequest, match="empty file inputs and buttons") as caught:
        read(MULTIPART, multipart(*[ignored] * 65, image_part(b"x")))
    assert caught.value.code == "invalid_body"


def test_text_of_a_button_has_a_limit() -> None:
    with pytest.raises(BadRequest, match="button submit has more than 256 bytes"):
        read(MULTIPART, multipart(image_part(b"x"), option_part("submit", b"x" * 257)))


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        (b'Content-Disposition: form-data; name="image"', "image"),
        (b'Content-Disposition: form-data; name="poling"', "poling"),
        (b'Content-Disposition: form-data; name="normalise"', "normalise"),
        (b'Content-Disposition: form-data; name="Pooling"', "Pooling"),
        (b'Content-Disposition: form-data; name="a\xff"\r\nContent-Type: application/json', "a\\ufffd"),
        (b'Content-Disposition: form-data; name="; filename*=x"', "; filename*=x"),
        (b'Content-Disposition: form-data; name="\\"; filename*=x"', '"; filename*=x'),
        (b'Content-Disposition: form-data; name=a; x="; filename*=x', "a"),
        (b'Content-Disposition: form-data; name="' + b"n" * 500 + b'"', "n" * 64),
        (b"Content-Disposition: form-data", None),
        (b"X: y", None),
    ],
)
def test_error_for_any_other_part_names_it(headers: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        read(MULTIPART, multipart(image_part(b"x"), part(headers, b"mean")))
    assert (caught.value.code, caught.value.param) == ("invalid_option", param)
    assert (param or "without a name") in caught.value.message


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([option_part("dtype", b"float32"), option_part("dtype", b"float32")], id="twice"),
        pytest.param([option_part("dtype", b"x" * 257)], id="too long"),
        pytest.param([option_part("dtype", b"\xff")], id="not UTF-8"),
    ],
)
def test_bad_option_parts_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(BadRequest) as caught:
        read(MULTIPART, multipart(image_part(b"x"), *parts))
    assert (caught.value.code, caught.value.param) == ("invalid_option", "dtype")


@pytest.mark.parametrize("encoding", [b"base64", b"QUOTED-PRINTABLE", b"x-\xff"])
def test_transfer_encodings_are_refused(encoding: bytes) -> None:
    headers = (
        b'Content-Disposition: form-data; name="a"; filename="a"\r\nContent-Transfer-Encoding: ' + encoding
    )
    with pytest.raises(BadRequest) as caught:
        read(MULTIPART, multipart(part(headers, b"AAAA")))
    assert caught.value.code == "invalid_body"
    assert "transfer encoding" in caught.value.message


@pytest.mark.parametrize("end", range(1, len(BODY) - len(b"--\r\n")))
def test_truncated_body_is_refused(end: int) -> None:
    with pytest.raises(BadRequest) as caught:
        read(MULTIPART, BODY[:end])
    assert caught.value.code == "invalid_body"


@pytest.mark.parametrize("end", ["--", "--\r\n", "--\r\nepilogue", "--\r\n\r\n--xYz--7\r\n"])
def test_bytes_after_the_last_boundary_are_ignored(end: str) -> None:
    body = image_part(b"x") + b"--" + BOUNDARY + end.encode()
    assert read(MULTIPART, body).images == (b"x",)


def test_blank_line_before_the_first_boundary_is_ignored() -> None:
    assert read(MULTIPART, b"\r\n" + multipart(image_part(b"x"))).images == (b"x",)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"x" * 5000 + b"\r\n" + BODY, id="long preamble"),
        pytest.param(b"x" * 5000, id="long preamble alone"),
        pytest.param(b"preamble" + multipart(), id="boundary not on a line of its own"),
        pytest.param(BODY.replace(b"\r\n", b"\n"), id="LF only"),
        pytest.param(BODY.replace(BOUNDARY, b"other"), id="other boundary"),
        pytest.param(multipart(part(b"no colon", b"x")), id="header without a colon"),
        pytest.param(multipart(part(b"X: " + b"y" * 10_000, b"x")), id="large header"),
        pytest.param(multipart(part(b"X" * 10_000 + b": y", b"x")), id="large header name"),
        pytest.param(multipart(part(b"\r\n".join([b"X: y"] * 50), b"x")), id="many headers"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read(MULTIPART, body)
    assert caught.value.code == "invalid_body"


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "; boundary=",
        '; boundary=""',
        "; boundary=" + "x" * 71,
        '; boundary="a "',
        "; boundary=\xe9",
        "; b=x",
    ],
)
def test_missing_or_invalid_boundary_is_refused(parameters: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read("multipart/form-data" + parameters, BODY)
    assert caught.value.code == "invalid_body"
    assert "boundary of 1 to 70 characters" in caught.value.message


@pytest.mark.parametrize("boundary", ["x", "x" * 70, "a'b (c)+_,-./:=?"])
def test_every_valid_boundary_is_accepted(boundary: str) -> None:
    body = multipart(image_part(b"x")).replace(BOUNDARY, boundary.encode())
    assert read(f'Multipart/Form-Data; charset=x; BOUNDARY="{boundary}"', body).images == (b"x",)


@pytest.mark.parametrize(
    ("body", "error", "code", "param"),
    [
        (multipart(), BadRequest, "empty_input", "images"),
        (multipart(option_part("pooling", b"mean")), BadRequest, "empty_input", "images"),
        (multipart(NO_FILE, BUTTON), BadRequest, "empty_input", "images"),
        (multipart(image_part(b"x"), image_part(b"")), BadRequest, "empty_input", "images[1]"),
        (multipart(*[image_part(b"x")] * 4), TooLarge, "too_many_images", "images"),
        (multipart(image_part(b"x"), image_part(b"x" * 1001)), TooLarge, "image_too_large", "images[1]"),
    ],
)
def test_missing_empty_and_too_many_or_large_images_are_refused(
    body: bytes, error: type[ApiError], code: str, param: str
) -> None:
    with pytest.raises(error) as caught:
        read(MULTIPART, body)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_limits_are_inclusive() -> None:
    assert len(read(MULTIPART, multipart(*[image_part(b"x" * 1000)] * 3)).images) == 3


@pytest.mark.parametrize("name", [b"Content-Type", b"Content-Disposition"])
def test_part_header_with_more_than_64_semicolons_is_refused(name: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read(MULTIPART, multipart(part(b"Content-Type: image/png\r\n" + name + b": x" + b";" * 65, b"x")))
    assert caught.value.code == "invalid_body"
    assert f"the {name.decode().lower()} of a part" in caught.value.message


@pytest.mark.parametrize("junk", [b'\\"', b'"\\', b'"', b"\\", b"a", b" ", b"filename*", b"1"], ids=repr)
@pytest.mark.parametrize("start", [b'; x="', b"; filename*", b"; x="])
def test_time_to_parse_part_headers_is_linear_in_their_size(start: bytes, junk: bytes) -> None:
    def feed(num_bytes: int) -> None:
        form = MultipartReader(BOUNDARY, LIMITS)
        head = b"Content-Disposition: form-data; filename*=x" + start
        body = image_part(b"x") + part(head + junk * ((num_bytes - len(head)) // len(junk)), b"x")
        form.feed(body)

    assert growth(feed, 1000) < 8
