"""Every inference route of vLLM 0.23 that makes sense through a gateway, in one table.

Left out on purpose: what changes an engine (LoRA loading, sleep, profiling, scaling), what shows its inside
(/server_info, /tokenizer_info, /load), SageMaker's aliases, and the WebSocket /v1/realtime.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from spillway_gateway.api.chat import parse_chat, parse_chat_batch
from spillway_gateway.api.completions import parse_completion
from spillway_gateway.api.messages import parse_messages
from spillway_gateway.api.multipart import parse_audio, replace_field
from spillway_gateway.api.parsed_body import ParseBody
from spillway_gateway.api.pooling import parse_pooling
from spillway_gateway.api.responses import parse_responses
from spillway_gateway.api.token_bodies import parse_generate, parse_unrouted
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.upstream.splice import replace_text


class Salting(Enum):
    """How a tenant's salt gets into the engine's block hashes."""

    FIELD = auto()  # the body's cache_salt
    NEEDLESS = auto()  # nothing is computed, so nothing is cached
    UNKNOWN = (
        auto()
    )  # the engine caches and takes no salt here: refused to tenants unless auth.unsaltedRoutes allows it


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """parse: finds model, prompt and the like. set_text: puts another text into a top-level field of the body.
    keeps_responses: replies can be asked for again by id, from the engine that made them."""

    path: str
    parse: ParseBody
    dialect: Dialect = Dialect.OPENAI
    salting: Salting = Salting.FIELD
    set_text: Callable[[bytes, str, str], bytes] = replace_text
    retryable: bool = True
    keeps_responses: bool = False


ROUTES = (
    ApiRoute("/v1/chat/completions", parse_chat),
    ApiRoute("/v1/chat/completions/batch", parse_chat_batch),
    ApiRoute("/v1/chat/completions/render", parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/completions", parse_completion),
    ApiRoute("/v1/completions/render", parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/responses", parse_responses, Dialect.RESPONSES, keeps_responses=True),
    ApiRoute("/v1/messages", parse_messages, Dialect.ANTHROPIC, Salting.UNKNOWN),
    ApiRoute("/v1/messages/count_tokens", parse_unrouted, Dialect.ANTHROPIC, Salting.NEEDLESS),
    ApiRoute("/inference/v1/generate", parse_generate),
    ApiRoute("/v1/embeddings", parse_pooling),
    ApiRoute("/v2/embed", parse_pooling, salting=Salting.UNKNOWN),
    ApiRoute("/pooling", parse_pooling),
    ApiRoute("/classify", parse_pooling),
    ApiRoute("/score", parse_pooling),
    ApiRoute("/v1/score", parse_pooling),
    ApiRoute("/rerank", parse_pooling),
    ApiRoute("/v1/rerank", parse_pooling),
    ApiRoute("/v2/rerank", parse_pooling),
    ApiRoute("/generative_scoring", parse_pooling, salting=Salting.UNKNOWN),
    ApiRoute("/tokenize", parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/detokenize", parse_unrouted, salting=Salting.NEEDLESS),
    ApiRoute("/v1/audio/transcriptions", parse_audio, salting=Salting.UNKNOWN, set_text=replace_field),
    ApiRoute("/v1/audio/translations", parse_audio, salting=Salting.UNKNOWN, set_text=replace_field),
)
