import pytest

from service.errors import HeadersTooLarge
from service.intake.content_type import MAX_CHARS, ContentType, parse_content_type


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ("Image/PNG", ContentType(b"image/png", {})),
        ('multipart/form-data; Boundary="a;b"', ContentType(b"multipart/form-data", {b"boundary": b"a;b"})),
        ("caf\xe9/\u20ac", ContentType(b"caf\xe9/?", {})),
    ],
)
def test_a_content_type_has_a_media_type_and_parameters(
    header: str | None, expected: ContentType | None
) -> None:
    assert parse_content_type(header) == expected


def test_a_content_type_is_parsed_up_to_a_length() -> None:
    start = "multipart/form-data; boundary=x"
    parsed = parse_content_type(start + ";" * (MAX_CHARS - len(start)))
    assert parsed is not None
    assert parsed.parameters[b"boundary"] == b"x"
    with pytest.raises(HeadersTooLarge):
        parse_content_type(start + ";" * (MAX_CHARS - len(start) + 1))
