"""Logs of a process that runs as a service: plain lines, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
import unicodedata
from datetime import UTC, datetime

from .output import HIDDEN, printable

LOGGERS = ("normec", "flwr")


class JsonLines(logging.Formatter):
    """One JSON object for each record: time (UTC), level, logger and message.

    Characters that control a terminal are escaped, because a message may repeat what a server sent.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": message}
        text = json.dumps(line, ensure_ascii=False)
        return "".join(json.dumps(one)[1:-1] if unicodedata.category(one) in HIDDEN else one for one in text)


class PlainLines(logging.Formatter):
    """The message alone, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(record.getMessage())


def log_to_stdout(log_format: str) -> None:
    """Send the records of normec and Flower to the standard output in one of the two formats."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines() if log_format == "json" else PlainLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "normec" else logging.WARNING)
