"""The private line between the pod's parent process and the middleware inside vLLM's API server.

One socket pair, inherited by the API server alone; one JSON object per line in each direction. Its end of file tells
the middleware that the parent is gone, whatever killed it.

    parent -> middleware   {"order": "drain", "delay_seconds": 5, "timeout_seconds": 60}   {"order": "hurry"}
                           {"order": "abandon"}: nothing can be computed or stored any more
    middleware -> parent   {"event": "serving"}  {"event": "ready"}  {"event": "self_check_failed", "reason": "..."}
                           {"event": "drained", "finished": 3, "cancelled": 1, "stored": 40, "left": 0}
    server.py  -> parent   {"event": "refused", "reason": "..."}, before there is a middleware
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_settings.typed import settings_json

ENVIRONMENT_VARIABLE = "SPILLWAY_ENGINE_POD"
REFUSED_EXIT_CODE = 2  # of the server, whose message says why
LINE_BYTES_MAX = 64 << 10


class PodBrief(msgspec.Struct, frozen=True):
    """The middleware's settings, carried in one environment variable."""

    control_fd: int | None = None  # None: no parent listens (the middleware used by itself)
    served_name: str = ""
    data_parallel_ranks: int = 1
    self_check: bool = True
    self_check_timeout_seconds: float = 120.0
    self_check_text: str = ""  # empty: the built-in texts
    reference: str | None = None  # key of reference_likelihood.REFERENCES; None: the model is not known
    vocabulary: int | None = None  # tokens
    generates_logits: bool = False  # vLLM shows logits if it is asked for generated tokens' log-probabilities
    dtype: str = ""
    quantised_kv: bool = False
    eager: bool = False
    settles: bool = False  # with a shared tier, unless `storing: eager`: it stores without work, and before it ends
    extra_arguments: int = 0  # how many at the end of vLLM's command line a person added
    names: SettingNames = PLAIN_NAMES  # of the settings, in messages
    configuration: dict[str, Any] = msgspec.field(default_factory=dict)

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT_VARIABLE: settings_json(self).decode()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> PodBrief:
        text = environment.get(ENVIRONMENT_VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else cls()


def encode_message(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class MessageBuffer:
    """Bytes in, whole messages out. A line longer than LINE_BYTES_MAX is a broken peer: ValueError."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError("a message on the pod channel has no end")
        return [json.loads(line) for line in lines if line]
