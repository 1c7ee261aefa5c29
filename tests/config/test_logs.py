from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from service.config.logs import configure_logging, make_formatter
from service.config.settings import LogFormat, LogLevel


def record(
    message: str = "%s said %d", *args: object, error: BaseException | None = None
) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("service.http.middleware", logging.WARNING, "file.py", 1, message, args, info)


def test_json_is_one_object_a_line_with_these_members() -> None:
    line = make_formatter("json").format(record("%s said\n%d", "she", 7))
    assert "\n" not in line
    members = json.loads(line)
    age = datetime.now(UTC) - datetime.fromisoformat(members.pop("timestamp"))
    assert timedelta(seconds=-1) < age < timedelta(seconds=60)
    assert members == {"level": "WARNING", "logger": "service.http.middleware", "message": "she said\n7"}


def test_json_has_the_extra_attributes_of_a_record_as_members() -> None:
    line = record("refused")
    line.__dict__.update(request_id="id-7", method="POST", route="/embed", status=429, code="queue_full")
    members = json.loads(make_formatter("json").format(line))
    assert {name: members[name] for name in ("request_id", "method", "route", "status", "code")} == {
        "request_id": "id-7",
        "method": "POST",
        "route": "/embed",
        "status": 429,
        "code": "queue_full",
    }


@pytest.mark.parametrize("text", ["\ud800", "\x00\x1b[31m", "\u2028", 'a"b\\c'])
def test_json_accepts_any_text(text: str) -> None:
    line = make_formatter("json").format(record(text))
    assert len(line.splitlines()) == 1
    assert line.encode()
    assert json.loads(line)["message"] == text


def test_traceback_is_a_member_of_the_same_line() -> None:
    try:
        raise ValueError("odd")
    except ValueError as error:
        line = make_formatter("json").format(record("failed", error=error))
    assert "\n" not in line
    assert "ValueError: odd" in json.loads(line)["exception"]


def test_text_is_time_level_logger_and_message() -> None:
    line = make_formatter("text").format(record("%s said %d", "she", 7))
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING service\.http\.middleware: she said 7"
    assert re.fullmatch(pattern, line)


Configure = Callable[[LogLevel, LogFormat], None]


def read_log(capfd: pytest.CaptureFixture[str]) -> str:
    for handler in logging.getLogger().handlers:
        handler.close()  # which waits until the log is written
    out, err = capfd.readouterr()
    assert out == ""
    return err


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Configures the log of a process that has none. Restores everything at the end."""
    root, stderr = logging.getLogger(), sys.stderr
    loggers = [root, *map(logging.getLogger, ("service", "models", "python_multipart", "PIL"))]
    levels, handlers = [logger.level for logger in loggers], root.handlers[:]

    def without_handlers(level: LogLevel, log_format: LogFormat) -> None:
        root.handlers[:] = []
        configure_logging(level, log_format)

    yield without_handlers
    root.handlers[:] = handlers
    sys.stderr = stderr
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_level_holds_for_our_loggers_and_libraries_log_from_warning(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("info", "json")
    for name in ("service.x", "models.x", "uvicorn.x", "python_multipart.x"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(name).log(level, "said")
    lines = [json.loads(line) for line in read_log(capfd).splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("service.x", "INFO"),
        ("service.x", "WARNING"),
        ("models.x", "INFO"),
        ("models.x", "WARNING"),
        ("uvicorn.x", "WARNING"),
    ]


@pytest.mark.parametrize("library", ["python_multipart.multipart", "PIL.TiffImagePlugin"])
def test_complaints_of_libraries_about_requests_are_not_logged(
    library: str, configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("info", "text")
    logging.getLogger(library).error("more samples than can be decoded")
    assert read_log(capfd) == ""


def test_level_above_warning_holds_for_libraries_too(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("error", "text")
    for name in ("service.x", "uvicorn.x"):
        logging.getLogger(name).warning("said")
        logging.getLogger(name).error("cried")
    assert [line.rpartition(" ")[2] for line in read_log(capfd).splitlines()] == ["cried", "cried"]


def test_loss_of_lines_is_a_line_of_the_log_at_every_level(
    configure: Configure, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("error", "json")
    file = sys.stderr.fileno()
    with open(os.devnull) as not_writable:
        stderr = os.dup(file)
        os.dup2(not_writable.fileno(), file)
        print("lost", file=sys.stderr, end="")  # noqa: T201
        logging.getLogger("service.x").error("lost")
        logging.getLogger().handlers[0].close()
        os.dup2(stderr, file)
        os.close(stderr)
    logging.getLogger("service.x").error("written")
    written, loss = (json.loads(line) for line in read_log(capfd).splitlines())
    assert written["message"] == "written"
    assert loss["message"] == "2 lines are missing here, because stderr could not take them"
    assert loss["level"] == "WARNING"
