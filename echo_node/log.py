"""Where log lines go: plain words to a person's terminal, one JSON object a line elsewhere. Quiet libraries."""

from __future__ import annotations

import json
import logging
import sys
import time

from echo_node.errors import one_line

_NOISY = ("libp2p", "transformers")
"""Libraries that set levels and handlers of their own."""


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "from": record.name,
            "what": one_line(record.getMessage()),
        }
        return json.dumps(told)


class _Words(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {one_line(record.getMessage())}"


def set_up(level: str = "warning") -> None:
    """Send our lines to standard error. Others' libraries are heard only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Words() if sys.stderr.isatty() else _JsonLines())
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    for name in _NOISY:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(logging.ERROR)
    logging.getLogger("echo_node").setLevel(level.upper())
