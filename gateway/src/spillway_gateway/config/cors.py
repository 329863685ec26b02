"""Web pages that may read answers in a browser: CORS."""

from __future__ import annotations

import re

from spillway_gateway.errors import ConfigError
from spillway_settings.typed import CamelSection, Text

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?|null")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class CorsConfig(CamelSection, frozen=True):
    """Defaults as vLLM's own server has them. origins empty: no page of another origin may read anything."""

    origins: tuple[Text, ...] = (ANY,)
    methods: tuple[Text, ...] = (ANY,)
    headers: tuple[Text, ...] = (ANY,)


def check_cors(setting: str, cors: CorsConfig) -> None:
    """Raises ConfigError."""
    for origin in cors.origins:
        if origin != ANY and _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"{setting}.origins: {origin!r} given, http://HOST[:PORT] or https://HOST[:PORT] needed, in small "
                "letters and without a path, as browsers send it; or '*' for every origin"
            )
    for key, names in (("methods", cors.methods), ("headers", cors.headers)):
        for name in names:
            if _TOKEN.fullmatch(name) is None:
                raise ConfigError(f"{setting}.{key}: {name!r} given, a name of HTTP or '*' needed")
