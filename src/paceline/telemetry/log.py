"""Logs as JSON lines: one object per record, with the fields that were handed to it."""

import json
import logging
import sys
from typing import Final, TextIO

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One line of JSON per record; values that JSON lacks are shown as text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        told = {
            "at_unix_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def log_as_json(level: int = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Send every record of this process to ``stream`` (default: standard error) as JSON lines."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # One line per request of somebody else's library helps nobody.
    logging.getLogger("grpc").setLevel(logging.WARNING)
