"""Every inference route of vLLM 0.23 that makes sense through a gateway, in one table.

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
from spillway_gateway.api.parsed_body import ParseBody
from spillway_gateway.api.pooling import PoolingBody, parse_pooling
from spillway_gateway.api.responses import ResponsesBody, parse_responses
from spillway_gateway.api.token_bodies import AnyBody, GenerateBody, parse_generate, parse_unrouted
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.splice import replace_text


class Salting(Enum):
    """How a tenant's cache salt enters the engine's block hashes."""

    FIELD = auto()  # the body's cache_salt
    NEEDLESS = auto()  # nothing is computed, so nothing is cached
    UNKNOWN = (
        auto()
    )  # the engine caches and takes no salt here: refused to tenants unless auth.unsaltedRoutes allows it


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """body: the fields that are read of a JSON body; None for a form. parse: reads them. set_text: replaces the text
    of a top-level field. keeps_responses: the engine stores replies, and serves them again by id.
    takes_transfer_params: the engine reads kv_transfer_params of the body."""

    path: str
    body: type | None
    parse: ParseBody
    dialect: Dialect = Dialect.OPENAI
    salting: Salting = Salting.FIELD
    set_text: Callable[[Body, str, Any], Body] = replace_text
    retryable: bool = True
    keeps_responses: bool = False
    takes_transfer_params: bool = False


ROUTES = (
    ApiRoute("/v1/chat/completions", ChatBody, parse_chat, takes_transfer_params=True),
    ApiRoute("/v1/chat/completions/batch", ChatBatchBody, parse_chat_batch),
    ApiRoute("/v1/chat/completions/render", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/completions", CompletionBody, parse_completion, takes_transfer_params=True),
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
        Salting.UNKNOWN,
        takes_transfer_params=True,
    ),
    ApiRoute("/v1/messages/count_tokens", AnyBody, parse_unrouted, Dialect.ANTHROPIC, Salting.NEEDLESS),
    ApiRoute("/inference/v1/generate", GenerateBody, parse_generate, takes_transfer_params=True),
    ApiRoute("/v1/embeddings", PoolingBody, parse_pooling),
    ApiRoute("/v2/embed", PoolingBody, parse_pooling, salting=Salting.UNKNOWN),
    ApiRoute("/pooling", PoolingBody, parse_pooling),
    ApiRoute("/classify", PoolingBody, parse_pooling),
    ApiRoute("/score", PoolingBody, parse_pooling),
    ApiRoute("/v1/score", PoolingBody, parse_pooling),
    ApiRoute("/rerank", PoolingBody, parse_pooling),
    ApiRoute("/v1/rerank", PoolingBody, parse_pooling),
    ApiRoute("/v2/rerank", PoolingBody, parse_pooling),
    ApiRoute("/generative_scoring", PoolingBody, parse_pooling, salting=Salting.UNKNOWN),
    ApiRoute("/tokenize", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/detokenize", AnyBody, parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/audio/transcriptions", None, parse_audio, salting=Salting.UNKNOWN, set_text=replace_field),
    ApiRoute("/v1/audio/translations", None, parse_audio, salting=Salting.UNKNOWN, set_text=replace_field),
)
