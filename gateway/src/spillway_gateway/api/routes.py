"""Every inference route of vLLM that makes sense through a gateway, in one table.

Left out on purpose: routes that change an engine (LoRA loading, sleep, profiling, scaling) or show its internals
(/server_info, /tokenizer_info, /load), SageMaker's aliases, and the WebSocket /v1/realtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from spillway_gateway.api.chat import ChatBatchBody, ChatBody, parse_chat, parse_chat_batch
from spillway_gateway.api.completions import CompletionBody, parse_completion
from spillway_gateway.api.messages import MessagesBody, parse_messages
from spillway_gateway.api.multipart import parse_audio, replace_field
from spillway_gateway.api.parsed_body import ParseBody, ParsedBody
from spillway_gateway.api.pooling import PoolingBody, parse_pooling
from spillway_gateway.api.responses import ResponsesBody, parse_responses
from spillway_gateway.api.token_bodies import AnyBody, GenerateBody, parse_generate, parse_unrouted
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.splice import replace_text
from spillway_settings.vllm_salts import OLDEST, SALTS_ALL, Version


class Salting(Enum):
    """Ways in which a tenant's cache salt enters the engine's block hashes."""

    FIELD = auto()  # the body's cache_salt
    NEEDLESS = auto()  # nothing is computed, so nothing is cached
    # The engine caches and takes no salt here: refused to tenants unless auth.unsaltedRoutes allows it.
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One inference route.

    Attributes:
        body: The fields of a JSON body that the gateway reads; None for a form.
        parse: Reads these fields.
        set_text: Replaces the text of a top-level field.
        keeps_responses: The engine stores replies and serves them again by id.
        takes_transfer_params: The engine reads kv_transfer_params of the body.
        salted_since: The first vLLM whose code hashes the salt, if salting is FIELD.
        two_legs: Another engine may compute the prompt; the body has the members of upstream/first_leg.py.
    """

    path: str
    body: type | None
    parse: ParseBody
    dialect: Dialect = Dialect.OPENAI
    salting: Salting = Salting.FIELD
    set_text: Callable[[Body, str, Any], Body] = replace_text
    retryable: bool = True
    keeps_responses: bool = False
    takes_transfer_params: bool = False
    salted_since: Version = OLDEST
    two_legs: bool = False

    def salting_of(self, parsed: ParsedBody, vllm: Version, tokens_max: int | None) -> Salting:
        """Return how engines of this vLLM or newer, which take prompts of up to `tokens_max`, salt one request."""
        if self.salting is not Salting.FIELD or vllm >= SALTS_ALL:
            return self.salting
        # Second turns after a tool of the engine's own, and embeddings of inputs that are computed in pieces.
        in_pieces = self.body is PoolingBody and tokens_max is not None and parsed.longest_tokens > tokens_max
        dropped = vllm < self.salted_since or (parsed.server_tools and self.keeps_responses) or in_pieces
        return Salting.UNKNOWN if dropped else Salting.FIELD

    @property
    def takes_salt(self) -> bool:
        """Whether the body may name a cache_salt; if an engine does not know the field, it ignores it."""
        return self.salting is not Salting.NEEDLESS and self.body is not None


ROUTES = (
    ApiRoute("/v1/chat/completions", ChatBody, parse_chat, takes_transfer_params=True, two_legs=True),
    ApiRoute("/v1/chat/completions/batch", ChatBatchBody, parse_chat_batch),
    ApiRoute("/v1/chat/completions/render", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/completions", CompletionBody, parse_completion, takes_transfer_params=True, two_legs=True),
    ApiRoute("/v1/completions/render", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute(
        "/v1/responses",
        ResponsesBody,
        parse_responses,
        Dialect.RESPONSES,
        keeps_responses=True,
        takes_transfer_params=True,
    ),
    ApiRoute(
        "/v1/messages",
        MessagesBody,
        parse_messages,
        Dialect.ANTHROPIC,
        takes_transfer_params=True,
        salted_since=SALTS_ALL,
        two_legs=True,
    ),
    ApiRoute("/v1/messages/count_tokens", AnyBody, parse_unrouted, Dialect.ANTHROPIC, Salting.NEEDLESS),
    ApiRoute("/inference/v1/generate", GenerateBody, parse_generate, takes_transfer_params=True),
    ApiRoute("/v1/embeddings", PoolingBody, parse_pooling),
    ApiRoute("/v2/embed", PoolingBody, parse_pooling, salting=Salting.UNKNOWN),
    ApiRoute("/pooling", PoolingBody, parse_pooling),
    ApiRoute("/classify", PoolingBody, parse_pooling),
    ApiRoute("/score", PoolingBody, parse_pooling, salted_since=SALTS_ALL),
    ApiRoute("/v1/score", PoolingBody, parse_pooling, salted_since=SALTS_ALL),
    ApiRoute("/rerank", PoolingBody, parse_pooling, salted_since=SALTS_ALL),
    ApiRoute("/v1/rerank", PoolingBody, parse_pooling, salted_since=SALTS_ALL),
    ApiRoute("/v2/rerank", PoolingBody, parse_pooling, salted_since=SALTS_ALL),
    ApiRoute("/generative_scoring", PoolingBody, parse_pooling, salted_since=SALTS_ALL),
    ApiRoute("/tokenize", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/detokenize", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/audio/transcriptions", None, parse_audio, salting=Salting.UNKNOWN, set_text=replace_field),
    ApiRoute("/v1/audio/translations", None, parse_audio, salting=Salting.UNKNOWN, set_text=replace_field),
)
