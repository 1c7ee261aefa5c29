"""Images are found in chats and replaced; every other byte stays."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from service.chat.chat_body import CHAT, RESPONSES, ChatBody, ChatForm, find_messages, parse_chat
from service.errors import ApiError, BadRequest
from service.fetching.image_urls import ImageUrl
from service.handoff.entry import Entry
from service.intake.embed_body import BodyLimits

LIMITS = BodyLimits(max_body_bytes=2**26, max_image_bytes=1000, max_images=4, timeout_s=1)
PIXELS = b"an image"
PART = '{"type":"image_url","image_url":{"url":"data:,an%20image"}}'


def entry(index: int) -> Entry:
    return Entry(f"vs1-{index:064x}", (1, 2 + 2 * index, 4), 2, 8, "float32", 100)


def tokens_part(index: int, more: str = "") -> str:
    return (
        f'{{"type":"image_embeds","uuid":"vs1-{index:064x}",'
        f'"image_embeds":{{"image_grid_thw":[1,{2 + 2 * index},4]}}{more}}}'
    )


def chat(*parts: str, members: str = "") -> str:
    return f'{{"messages":[{{"role":"user","content":[{",".join(parts)}]}}]{members}}}'


def parse(text: str | bytes, form: ChatForm = CHAT) -> ChatBody:
    body = text if isinstance(text, bytes) else text.encode()
    return parse_chat([body], form, LIMITS)


def passed_on(text: str) -> str:
    found = parse(text)
    entries = [entry(index) for index in range(len(found.images))]
    return (found.with_entries(entries) if entries else found.body).decode()


def refusal(text: str | bytes, form: ChatForm = CHAT) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(text, form)
    return caught.value


def test_images_are_replaced_in_order() -> None:
    text = chat(PART, '{"type":"text","text":"a"}', PART)
    assert parse(text).images == (PIXELS, PIXELS)
    assert passed_on(text) == chat(tokens_part(0), '{"type":"text","text":"a"}', tokens_part(1))


@pytest.mark.parametrize(
    "part",
    [
        PART,
        '{"image_url":{"url":"data:,an%20image"},"type":"image_url"}',
        '{"image_url":"data:,an%20image"}',
        '{"type":null,"image_url":"data:,an%20image"}',
        '{"type":"image_url","image_url":"data:,an%20image"}',
        '{"type":"input_image","image_url":"data:,an%20image"}',
        '{"type":"image_url","image_url":{"url":"data:,an%20image","detail":"low"}}',
        # With a uuid, vLLM goes by the members.
        '{"type":"text","uuid":"u","image_url":"data:,an%20image"}',
        '{"type":"video_url","uuid":7,"video_url":"x","image_url":{"url":"data:,an%20image"}}',
        '{"type":"text","type":"image_url","image_url":"","image_url":"data:,an%20image"}',
        r'{"ty\u0070e":"\u0069mage_url","\u0069\u006d\u0061\u0067\u0065_url":"data:,an%20image"}',
    ],
)
def test_part_that_vllm_reads_as_an_image_is_replaced(part: str) -> None:
    found = parse(chat(part))
    assert found.images == (PIXELS,)
    [message] = json.loads(found.with_entries([entry(0)]))["messages"]
    [sent] = message["content"]
    assert sent["type"] == "image_embeds"
    assert sent["uuid"] == entry(0).uuid
    assert sent["image_embeds"] == {"image_grid_thw": [1, 2, 4]}
    assert not {"image_url", "image_pil"} & set(sent)


@pytest.mark.parametrize(
    "part",
    [
        '"image_url"',
        "7",
        "null",
        '["image_url"]',
        '{"type":"text","text":"image_url"}',
        '{"type":"text","image_url":"data:,an%20image"}',
        '{"type":"image_embeds","uuid":"u","image_embeds":{"image_grid_thw":[1,2,2]}}',
        '{"type":"video_url","video_url":{"url":"http://image.test/v.mp4"}}',
        '{"type":"input_audio","input_audio":{"data":"image","format":"wav"}}',
        '{"type":"image_url"}',
        '{"type":"image_url","image_url":null,"uuid":"u"}',
        '{"type":"image_url","image_url":{}}',
        '{"type":"image_url","image_url":{"url":7}}',
        '{"type":"image_url","image_url":7}',
        '{"type":"image_url","image_url":""}',
        '{"type":["image_url"],"image_url":"data:,an%20image"}',
    ],
)
def test_other_part_stays_beside_an_image(part: str) -> None:
    assert passed_on(chat(part)) == chat(part)
    assert passed_on(chat(part, PART)) == chat(part, tokens_part(0))


def test_all_other_bytes_stay() -> None:
    before = (
        ' {\n"n":1.0,"big":123456789012345678901234567890,"e":1e400,"nan":NaN,"i":-Infinity,"twice":1,'
        r'"twice":2,"t":"\u0022\ud800 \u00e9 \\u0041 é 🙂","messages":[ '
        '{"role":"system","content":"image"} , {"content" : [\t'
    )
    after = '\n] ,"role":"user","content":"last wins"}],"deep":{"a":[[[{}]]]},"seed":0.10} \r\n'
    assert passed_on(before + PART + after) == before + tokens_part(0) + after


def test_members_of_an_image_that_vllm_does_not_know_stay_as_they_came() -> None:
    others = r'"detail":"high","max_pixels":1e400,"x":{"a":1.0,"b":"\ud800"},"x":2'
    part = f'{{ {others}, "image_pil" : null, "image_embeds":{{"image_grid_thw":[9,9,9]}},{PART[1:]}'
    assert passed_on(chat(part)) == chat(tokens_part(0, f",{others}"))


def test_lists_of_messages_that_stand_twice_are_all_searched() -> None:
    text = '{"messages":[{"content":[PART]}],"messages":[{"content":[],"content":[PART]}]}'
    text = text.replace("PART", PART)
    assert passed_on(text).count("image_embeds") == 4
    assert "data:" not in passed_on(text)


def test_byte_order_mark_stays() -> None:
    text = "\ufeff" + chat(PART)
    assert passed_on(text) == "\ufeff" + chat(tokens_part(0))


def test_url_is_left_to_the_fetcher() -> None:
    text = chat('{"type":"image_url","image_url":{"url":"https://images.test/a.png"}}')
    assert parse(text).images == (ImageUrl("https://images.test/a.png"),)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[[[", b"\xff\xfe", b"{}", b"null", b'{"messages":[{"content":"text"}]}', b"[" * 1000],
)
def test_body_without_the_word_image_is_not_even_read(body: bytes) -> None:
    found = parse(body)
    assert found.images == ()
    assert found.body == body


@pytest.mark.parametrize(
    "text",
    [
        '"image"',
        '["image"]',
        '{"messages":"image"}',
        '{"messages":{"content":[PART]}}'.replace("PART", PART),
        '{"messages":["image",[PART],{"content":{"image":1}}]}'.replace("PART", PART),
        '{"input":[{"content":[PART]}]}'.replace("PART", PART),
        '{"messages":[],"tools":[{"messages":[{"content":[PART]}]}]}'.replace("PART", PART),
    ],
)
def test_image_elsewhere_is_none_of_the_chat(text: str) -> None:
    found = parse(text)
    assert found.images == ()
    assert found.body == text.encode()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (chat(PART)[:-1], "no ,"),
        (chat(PART) + "x", "follows"),
        (chat(PART).replace(":", "", 1), "no :"),
        (chat(PART).replace('"messages"', "7"), "name"),
        (chat(PART, "\x00"), "line 1"),
        (chat(PART).encode("utf-16"), "UTF-8"),
        (chat(PART).encode("utf-16-le"), "line 1"),
        (chat(PART).encode("utf-32-be"), "line 1"),
        (chat(PART).encode() + b"\xff", "UTF-8"),
        (chat(PART, "[" * 100_000 + "]" * 100_000), "nested"),
        (chat(PART, "[" * 2**20), "more than 1000000"),
        (chat(PART, "[" * 900_000), "nested"),
        (chat(PART, *["0"] * 70_000), "too many"),
    ],
)
def test_body_that_may_hold_images_must_be_readable(body: str | bytes, reason: str) -> None:
    """Otherwise the LLM server might find an image that was not found here."""
    error = refusal(body)
    assert (error.status, error.code) == (400, "invalid_json")
    assert reason in error.message


def test_ten_thousand_parts_are_read_in_a_moment() -> None:
    parts = ['{"type":"text","text":"image"}'] * 10_000
    started_at = time.perf_counter()
    assert passed_on(chat(*parts, PART)) == chat(*parts, tokens_part(0))
    assert time.perf_counter() - started_at < 2


def test_huge_strings_are_read_in_a_moment() -> None:
    part = json.dumps({"type": "text", "text": 'image "\\' * 2**20})
    started_at = time.perf_counter()
    assert passed_on(chat(part, PART)) == chat(part, tokens_part(0))
    assert time.perf_counter() - started_at < 2


@pytest.mark.parametrize(
    ("url", "status", "code"),
    [
        ("data:image/png;base64,???", 400, "invalid_base64"),
        ("data:image/png;base64,", 400, "empty_input"),
        ("data:image/png;base64," + "A" * 2000, 413, "image_too_large"),
        ("file:///etc/passwd", 400, "url_not_allowed"),
        ("/etc/passwd", 400, "url_not_allowed"),
    ],
)
def test_image_that_cannot_be_decoded_is_named(url: str, status: int, code: str) -> None:
    error = refusal(chat(PART, json.dumps({"type": "image_url", "image_url": {"url": url}})))
    assert (error.status, error.code, error.param) == (status, code, "images[1]")


def test_too_many_images_are_refused() -> None:
    assert refusal(chat(*[PART] * 5)).code == "too_many_images"


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
def test_settings_of_vllm_that_would_change_the_picture_conflict_with_images(name: str) -> None:
    def asking(value: Any) -> str:
        return f',"{name}":{json.dumps(value)}'

    error = refusal(chat(PART, members=asking({"max_pixels": 1000})))
    assert (error.status, error.code, error.param) == (400, "option_conflict", name)
    assert refusal(chat(PART, members=asking({"image": {}}) + asking({}))).param == name
    assert parse(chat(PART, members=asking(None) + asking({}))).images == (PIXELS,)
    text = chat('{"type":"text","text":"image"}', members=asking({"max_pixels": 1000}))
    assert passed_on(text) == text


@pytest.mark.parametrize("member", ["content", "output"])
def test_responses_take_no_images(member: str) -> None:
    part = {"type": "input_image", "image_url": "data:,an%20image"}
    text = json.dumps({"input": [{"role": "user", member: [part]}]})
    error = refusal(text, RESPONSES)
    assert (error.status, error.code, error.param) == (400, "invalid_option", "input")
    assert "/v1/chat/completions" in error.message
    for other in ('{"input":"an image"}', '{"input":[{"content":[{"type":"input_text","text":"image"}]}]}'):
        assert parse(other, RESPONSES).body == other.encode()


@pytest.mark.parametrize(
    ("text", "is_chat"),
    [
        (chat(PART), True),
        ('{"model":"m","messages":[]}', True),
        ('{"input":"messages"}', False),
        ('{"input":["\\"messages\\""]}', False),
        ('{"input":[{"messages":[]}]}', False),
        ('{"input":"x","messages":null}', False),
        ('{"messages":[', False),
        ("", False),
    ],
)
def test_chat_has_a_list_of_messages(text: str, is_chat: bool) -> None:
    assert find_messages([text[:9].encode(), text[9:].encode()]) == (text.encode(), is_chat)


def test_chunks_are_let_go() -> None:
    chunks = [chat(PART).encode()]
    parse_chat(chunks, CHAT, LIMITS)
    assert chunks == []


def test_error_about_an_image_is_a_bad_request() -> None:
    assert isinstance(refusal(chat(PART, "\x00")), BadRequest)
