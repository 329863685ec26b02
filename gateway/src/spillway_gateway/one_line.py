"""Log lines that no text from outside breaks: a path in a message may hold what viewers take for the end of a line."""

from __future__ import annotations

import logging
import re

# C0, DEL, C1 (U+0085 among them) and the line and paragraph separators.
_BREAKING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class OneLineFormatter(logging.Formatter):
    """Escapes control characters in the message; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _BREAKING.sub(lambda found: f"\\u{ord(found[0]):04x}", super().formatMessage(record))
