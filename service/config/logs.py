"""How the log is written: as text, or as one JSON object a line for a log store. Always on stderr.

Lines about a request carry `request_id`, `method`, `route`, `status` and `code` as members of their own.
"""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

from service.config.settings import LogFormat, LogLevel

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MEMBERS = ("timestamp", "levelname", "name", "message")


def make_formatter(log_format: LogFormat) -> logging.Formatter:
    """The formatter of every line; times are local in text, and UTC in JSON."""
    if log_format == "text":
        return logging.Formatter(_TEXT)
    return JsonFormatter(
        _MEMBERS,
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        timestamp=True,
    )


def configure_logging(level: LogLevel, log_format: LogFormat) -> None:
    """Our loggers at `level`, those of libraries at `warning` or less talkative."""
    ours = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter(log_format))
    logging.basicConfig(level=max(ours, logging.WARNING), handlers=[handler])
    for name in ("service", "models"):
        logging.getLogger(name).setLevel(ours)
    for library in ("python_multipart", "PIL"):  # which complain of what callers send
        logging.getLogger(library).setLevel(logging.CRITICAL)
