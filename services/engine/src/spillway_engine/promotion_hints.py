"""POST /spillway/promote: the gateway names a prefix whose request waits there, so that this engine promotes it.

    {"token_ids": [1, 2, 3], "cache_salt": null}     the prefix as the engine would see it
    -> 202 {"outcome": "accepted"}                   promoted while nothing else needs the shared tier, or not at all
    -> 429 {"outcome": "busy"}                       too many hints, or too many without a request
    -> 404 {"outcome": "off"}                        this engine promotes nothing ahead

The caller sends the engine's own API key if there is one. The hint goes to EngineCore over vLLM's own line for
utilities, where the scheduler half of the connector hashes the tokens and takes it (connector,
engine/features/hints.py). An engine with data parallel ranks has one EngineCore each, and the header
X-Data-Parallel-Rank says for which the hint is: the one that will get the request.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec

from spillway_engine.engine_core import ask_engine_core
from spillway_engine.in_flight import Receive, Scope, body_of, error_body
from spillway_engine.in_process import KEY_NEEDED, KeyCheck
from spillway_settings.wire import PROMOTE_PATH, PROMOTE_UTILITY, RANK_HEADER

logger = logging.getLogger("vllm.spillway_engine")

BODY_BYTES_MAX = 4 << 20
TOKENS_MAX = 262_144
HINTS_MAX = 8  # on their way to EngineCore at once
_STATUS = {"accepted": 202, "busy": 429, "off": 404}


class Hint(msgspec.Struct, frozen=True):
    token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]], msgspec.Meta(max_length=TOKENS_MAX)]
    cache_salt: str | None = None


_read_hint = msgspec.json.Decoder(Hint).decode


class PromotionHints:
    """The hints of one API-server process, on its event loop. ranks: its engine's data parallel ranks."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._key = KeyCheck()
        self._under_way = 0

    async def answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        if scope["method"] != "POST":
            return 405, error_body(f"{PROMOTE_PATH} takes POST", 405)
        if not self._key.accepts(scope):
            return 401, error_body(KEY_NEEDED, 401)
        if self._under_way >= HINTS_MAX:
            return _STATUS["busy"], {"outcome": "busy"}
        self._under_way += 1
        try:
            body = await body_of(receive, BODY_BYTES_MAX)
            if body is None:
                return 413, error_body(f"a hint has at most {BODY_BYTES_MAX} bytes", 413)
            try:
                hint = _read_hint(body)
            except msgspec.MsgspecError as error:
                return 400, error_body(f"not a hint: {error}", 400)
            rank: int | None = None
            if self._ranks > 1:
                rank = self._rank_of(scope)
                if rank is None:
                    return 400, error_body(f"{RANK_HEADER}: 0 to {self._ranks - 1} needed", 400)
            return await self._pass_on(scope, hint, rank)
        finally:
            self._under_way -= 1

    def _rank_of(self, scope: Scope) -> int | None:
        """Return the rank that the request names; None: it names no rank of this engine."""
        given = dict(scope["headers"]).get(RANK_HEADER.encode(), b"")
        return int(given) if given.isdigit() and len(given) < 5 and int(given) < self._ranks else None

    async def _pass_on(self, scope: Scope, hint: Hint, rank: int | None) -> tuple[int, dict[str, Any]]:
        try:
            outcome = await ask_engine_core(scope["app"], PROMOTE_UTILITY, hint.token_ids, hint.cache_salt, rank=rank)
        except LookupError:
            return _STATUS["off"], {"outcome": "off"}
        except TimeoutError:
            return _STATUS["busy"], {"outcome": "busy"}
        except Exception as error:  # an engine without the connector, or one that is ending
            logger.warning("a promotion hint was not taken: %s", error)
            return _STATUS["off"], {"outcome": "off"}
        return _STATUS.get(outcome, 429), {"outcome": outcome}
