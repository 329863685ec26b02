"""/spillway/weights: which weights this engine's KV is shared as, and a new name for weights that changed in place.

    GET  -> 200 {"version": "step-1200", "known": true, "namespace": "9f0c...", "refused": null}
    POST {"version": "step-1201"}     the engine has the weights that this name stands for
         -> 200, as GET               from now on its KV is shared with every engine that was given this name
         -> 409 {"error": ...}        not now: the message says what to do first
    POST {"version": null}            it has the weights that it was started with again

The caller sends the engine's own API key if there is one. The name goes to every data parallel rank's EngineCore
(connector, engine/namespace/weights.py); one that has it already does nothing, so a call that failed can be repeated.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec

from spillway_engine.engine_core import EngineEndedError, ask_engine_core
from spillway_engine.in_flight import Receive, Scope, body_of, error_body
from spillway_engine.in_process import KEY_NEEDED, KeyCheck
from spillway_settings.wire import WEIGHTS_PATH, WEIGHTS_UTILITY

BODY_BYTES_MAX = 4096
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}\Z"


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)] | None


_read_name = msgspec.json.Decoder(Named).decode


class WeightNames:
    """The answers of one API-server process, on its event loop. ranks: its engine's data parallel ranks."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks: list[int | None] = [None] if ranks == 1 else list(range(ranks))
        self._key = KeyCheck()
        self._naming = asyncio.Lock()  # so that two names at once are not mixed over the ranks

    async def answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        if scope["method"] not in ("GET", "POST"):
            return 405, error_body(f"{WEIGHTS_PATH} takes GET and POST", 405)
        if not self._key.accepts(scope):
            return 401, error_body(KEY_NEEDED, 401)
        name: list[str | None] = []
        if scope["method"] == "POST":
            body = await body_of(receive, BODY_BYTES_MAX)
            if body is None:
                return 413, error_body(f"the name of weights comes in at most {BODY_BYTES_MAX} bytes", 413)
            try:
                name = [_read_name(body).version]
            except msgspec.MsgspecError as error:
                hint = 'send {"version": NAME}, a name of 1 to 128 letters, digits and ._:/@+- or null'
                return 400, error_body(f"no name of weights: {error}; {hint}", 400)
        try:
            async with self._naming:
                answers = [
                    await ask_engine_core(scope["app"], WEIGHTS_UTILITY, *name, rank=rank) for rank in self._ranks
                ]
        except TimeoutError:
            return 503, error_body("the engine did not answer in time; ask again", 503)
        except EngineEndedError as error:
            return 503, error_body(f"the engine has ended: {error}", 503)
        except Exception as error:  # an engine without the connector
            return 404, error_body(f"this engine has no weights to name: {error}", 404)
        if not all(answers):
            return 404, error_body("this engine does not offload KV by Spillway's connector", 404)
        for answer in answers:
            if answer["refused"] is not None:
                return 409, error_body(answer["refused"], 409)
        first = answers[0]
        agreed = all(answer["known"] and answer["version"] == first["version"] for answer in answers)
        return 200, {**first, "known": agreed}
