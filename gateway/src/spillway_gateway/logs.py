"""Logging of the gateway process: one line per record, at the configured level."""

from __future__ import annotations

import logging
import re
import sys

from spillway_gateway.config.settings import LogConfig

# C0, DEL, C1 (U+0085 among them) and the line and paragraph separators: viewers break a line at each of them.
_LINE_BREAKING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
LINE_CHARS_MAX = 8192  # engines and clients write parts of it
_REQUESTS = "spillway_gateway.upstream.relay"  # logs one line per request at DEBUG


class OneLineFormatter(logging.Formatter):
    """Escapes control characters in the message, which may quote a client's or an engine's text, and cuts a long one; a
    traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if len(line) > LINE_CHARS_MAX:
            line = f"{line[:LINE_CHARS_MAX]}... ({len(line)} characters)"
        return _LINE_BREAKING.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def set_up(config: LogConfig, *, with_pid: bool = False) -> None:
    """Log to stderr. Called once, before the first record. with_pid: one of several processes that log there."""
    handler = logging.StreamHandler(sys.stderr)
    pid = "%(process)d " if with_pid else ""
    handler.setFormatter(OneLineFormatter(f"%(asctime)s %(levelname)s {pid}%(name)s %(message)s"))
    logging.basicConfig(handlers=[handler])
    apply(config)
    for noisy in ("uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def apply(config: LogConfig) -> None:
    """Put a new configuration's levels into effect."""
    logging.getLogger().setLevel(config.level.upper())
    logging.getLogger(_REQUESTS).setLevel(logging.DEBUG if config.requests else logging.NOTSET)
