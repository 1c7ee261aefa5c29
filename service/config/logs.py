"""The log of a process: text, or one JSON object a line for a log store. Always on stderr.

Lines about a request have the members `request_id`, `method`, `route`, `status` and `code` in JSON. No thread
that logs waits for stderr to be read.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from pythonjsonlogger.json import JsonFormatter

from service.config.log_stream import LogStream
from service.config.settings import LogFormat, LogLevel

logger = logging.getLogger(__name__)

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MEMBERS = ("timestamp", "levelname", "name", "message")


class _Handler(logging.StreamHandler[LogStream]):
    def close(self) -> None:
        """Called by `logging.shutdown`, also at the end of the interpreter."""
        self.stream.wait_until_written()
        super().close()


def make_formatter(log_format: LogFormat) -> logging.Formatter:
    """The formatter of every line. Times are local in text, and UTC in JSON."""
    if log_format == "text":
        return logging.Formatter(_TEXT)
    return JsonFormatter(
        _MEMBERS,
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        timestamp=True,
    )


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Sets our loggers to `level`, and those of libraries to `warning` or a more severe level.

    Replaces `sys.stderr`, so that warnings, uncaught exceptions and progress bars block no thread either.
    """
    ours = logging.getLevelNamesMapping()[level.upper()]
    formatter = make_formatter(log_format)
    # None if the process was started with file 2 closed. The number may then be that of another file.
    file = sys.__stderr__.fileno() if sys.__stderr__ else os.open(os.devnull, os.O_WRONLY)

    def describe_loss(count: int) -> str:
        """A warning that is written at every level."""
        message = "%d lines are missing here, because stderr could not take them"
        return f"{formatter.format(_warning(message, count))}\n"

    stream = LogStream(file, describe_loss)
    sys.stderr = stream
    handler = _Handler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(level=max(ours, logging.WARNING), handlers=[handler])
    for name in ("service", "models"):
        logging.getLogger(name).setLevel(ours)
    for library in ("python_multipart", "PIL"):  # they complain of what clients send
        logging.getLogger(library).setLevel(logging.CRITICAL)


def _warning(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord(logger.name, logging.WARNING, __file__, 0, message, arguments, None)


def end_process(code: int) -> NoReturn:
    """Ends the process, whatever its threads do. Waits at most one second for the log to be written."""
    logging.shutdown()
    os._exit(code)
