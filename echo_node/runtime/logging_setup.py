"""Logging setup: text on a terminal, one JSON object per line elsewhere."""

from __future__ import annotations

import json
import logging
import sys
import time

from echo_node.errors import one_line

_NOISY = ("libp2p", "transformers")
"""Libraries that set their own levels and handlers."""


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "from": record.name,
            "what": one_line(record.getMessage()),
        }
        return json.dumps(fields)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {one_line(record.getMessage())}"


def set_up(level: str = "warning") -> None:
    """Log to standard error; other libraries only from level ERROR."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Text() if sys.stderr.isatty() else _JsonLines())
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    for name in _NOISY:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.ERROR)
    logging.getLogger("echo_node").setLevel(level.upper())
