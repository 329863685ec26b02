"""A body that cannot be parsed, as the client is told: which field, and what was expected there."""

from __future__ import annotations

import re

import msgspec

from spillway_gateway.errors import ClientBadRequest

_FIELD = re.compile(r"at `\$\.?([^`]*)`")


def bad_body(error: Exception) -> ClientBadRequest:
    """Never quotes the body itself."""
    if isinstance(error, msgspec.ValidationError):
        text = str(error)
        found = _FIELD.search(text)
        param = (found.group(1) or None) if found else None
        missing = re.search(r"missing required field `([^`]+)`", text)
        if missing:
            param = missing.group(1)
        return ClientBadRequest(f"The request body has a field of the wrong type: {text}", param)
    if isinstance(error, RecursionError):
        return ClientBadRequest("The request body is nested too deeply", code="invalid_json")
    return ClientBadRequest(f"The request body is not valid JSON: {error}", code="invalid_json")
