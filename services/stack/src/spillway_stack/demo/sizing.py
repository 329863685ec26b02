"""Length of the documents, and how to evict them from the device cache. Pure: from rates and counts to counts."""

from __future__ import annotations

from dataclasses import dataclass

from spillway_stack.errors import StackError

DOCUMENTS = 3  # each passes every phase once; a phase's figure is the median over them
LENGTHS = (8192, 4096, 2048, 1024, 512, 256)  # tokens of a document's prefix
# One cold prefill: long enough for the ratios to mean something, short enough for a demo of a few minutes.
COLD_SECONDS_MAX = 8.0
ANSWER_TOKENS = 16
SPARE_SHORT_ANSWERS = 6


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine of the stack holds; read from its /spillway/config."""

    max_length: int  # tokens of prompt and answer
    block_size: int  # tokens
    chunk_tokens: int  # unit of offload
    device_blocks: int
    cpu_chunks: int
    bytes_per_token: int

    @property
    def device_tokens(self) -> int:
        """Tokens of prompts in flight: vLLM reserves block 0."""
        return (self.device_blocks - 1) * self.block_size

    @property
    def cpu_tokens(self) -> int:
        return self.cpu_chunks * self.chunk_tokens

    def reusable_tokens(self, prompt_tokens: int) -> int:
        """Of a prompt seen before: whole chunks, and never the last token, which is always computed."""
        return (prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens


def choose_document_tokens(
    prefill_tokens_per_second: float, limits: EngineLimits, shared_tier_bytes: int | None = None
) -> int:
    """The longest of LENGTHS that is cold for at most COLD_SECONDS_MAX and fits the engine.

    The CPU tier must hold all DOCUMENTS at once, the device cache one of them with its question.
    Raises StackError when not even the shortest fits.
    """
    fitting = [tokens for tokens in LENGTHS if _fits(tokens, limits, shared_tier_bytes)]
    if not fitting:
        raise StackError(_too_small(limits, shared_tier_bytes))
    affordable = [tokens for tokens in fitting if tokens <= prefill_tokens_per_second * COLD_SECONDS_MAX]
    return affordable[0] if affordable else fitting[-1]


def prompt_tokens_max(document_tokens: int, limits: EngineLimits) -> int:
    """Below it a prompt's reusable part is `document_tokens`: the question lies in a last, partial chunk."""
    return document_tokens + limits.chunk_tokens


def short_answers_to_evict(document_blocks: int, limits: EngineLimits) -> int:
    """One-block answers, at the same time, that evict a document from the device beside the other documents.

    The device cache evicts in least-recently-used order. Asking about the other documents makes them the most recent;
    each short answer then takes one older block, those of the document included. It fills no whole block, so it stores
    nothing in the CPU tier. vLLM must run that many at once (max_num_seqs).
    """
    others = (DOCUMENTS - 1) * document_blocks
    return max(0, limits.device_blocks - 1 - others) + SPARE_SHORT_ANSWERS


def _fits(tokens: int, limits: EngineLimits, shared_tier_bytes: int | None) -> bool:
    return (
        tokens % limits.chunk_tokens == 0
        and prompt_tokens_max(tokens, limits) + ANSWER_TOKENS <= min(limits.max_length, limits.device_tokens)
        and tokens * DOCUMENTS <= limits.cpu_tokens
        and (shared_tier_bytes is None or tokens * DOCUMENTS * limits.bytes_per_token <= shared_tier_bytes // 2)
    )


def _too_small(limits: EngineLimits, shared_tier_bytes: int | None) -> str:
    tokens = next((tokens for tokens in reversed(LENGTHS) if tokens % limits.chunk_tokens == 0), None)
    if tokens is None:
        return f"the demo's longest document has {LENGTHS[0]} tokens, one chunk has {limits.chunk_tokens}"
    blocks = -(-(prompt_tokens_max(tokens, limits) + ANSWER_TOKENS) // limits.block_size) + 1
    chunks = tokens * DOCUMENTS // limits.chunk_tokens
    shared = "" if shared_tier_bytes is None else f", a shared tier of {shared_tier_bytes} bytes"
    return (
        f"the engines are too small for {DOCUMENTS} documents of {tokens} tokens: {limits.device_blocks} device "
        f"blocks, {limits.cpu_chunks} chunks in the CPU tier, context {limits.max_length}{shared}; run `make down` "
        f"and then `make up` with DEVICE_BLOCKS >= {blocks} and NUM_CPU_BLOCKS >= {chunks}"
    )
