"""Length of the documents, and how to evict them from the device cache. Pure: from rates and counts to counts."""

from __future__ import annotations

from dataclasses import dataclass

from spillway_stack.errors import StackError

DOCUMENTS = 3  # each passes every phase once; a phase's figure is the median over them
LENGTHS = (8192, 4096, 2048, 1024, 512, 256)  # tokens of a document's prefix
# One cold prefill: long enough for the ratios to mean something, short enough for a demo of a few minutes.
COLD_SECONDS_MAX = 8.0
ANSWER_TOKENS = 16
PROBES = 2  # prompts that measure the prefill rate before the documents, on the engine that computes these
PROBE_TOKENS = 768
SPARE_SHORT_ANSWERS = 6


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one engine of the stack, read from its /spillway/config."""

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

    def reusable_tokens(self, prompt_tokens: int) -> int:
        """Tokens of a prompt that a hit can reuse: whole chunks, and never the last token, which is always computed."""
        return (prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens


def choose_document_tokens(
    prefill_tokens_per_second: float, limits: EngineLimits, shared_tier_bytes: int | None = None
) -> int:
    """The longest of LENGTHS that is cold for at most COLD_SECONDS_MAX and fits the engine.

    The CPU tier must hold the probes and all DOCUMENTS at once, the device cache one document with its question.

    Args:
        prefill_tokens_per_second: infinity chooses the longest that fits.

    Raises:
        StackError: not even the shortest fits.
    """
    fitting = [tokens for tokens in LENGTHS if _fits(tokens, limits, shared_tier_bytes)]
    if not fitting:
        raise StackError(_too_small(limits, shared_tier_bytes))
    affordable = [tokens for tokens in fitting if tokens <= prefill_tokens_per_second * COLD_SECONDS_MAX]
    return affordable[0] if affordable else fitting[-1]


def prompt_tokens_max(document_tokens: int, limits: EngineLimits) -> int:
    """Bound below which a prompt's reusable part is `document_tokens`: question and answer lie in a last, partial
    chunk.

    The KV of answers is kept too. An answer that filled a chunk would take a row of the CPU tier from a document, and
    after another rounding a further one.
    """
    return document_tokens + max(1, limits.chunk_tokens - ANSWER_TOKENS)


def cpu_chunks_needed(document_tokens: int, limits: EngineLimits) -> int:
    """Rows of the CPU tier that keep the probes and all documents with their answers."""
    documents = DOCUMENTS * ((prompt_tokens_max(document_tokens, limits) - 1 + ANSWER_TOKENS) // limits.chunk_tokens)
    return documents + PROBES * ((probe_tokens(limits) + ANSWER_TOKENS) // limits.chunk_tokens)


def probe_tokens(limits: EngineLimits) -> int:
    """A probe's prompt is shorter than this."""
    return min(PROBE_TOKENS, limits.max_length // 2)


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
        and cpu_chunks_needed(tokens, limits) <= limits.cpu_chunks
        and (shared_tier_bytes is None or tokens * DOCUMENTS * limits.bytes_per_token <= shared_tier_bytes // 2)
    )


def _too_small(limits: EngineLimits, shared_tier_bytes: int | None) -> str:
    tokens = next((tokens for tokens in reversed(LENGTHS) if tokens % limits.chunk_tokens == 0), None)
    if tokens is None:
        return f"the demo's longest document has {LENGTHS[0]} tokens, one chunk has {limits.chunk_tokens}"
    blocks = -(-(prompt_tokens_max(tokens, limits) + ANSWER_TOKENS) // limits.block_size) + 1
    chunks = cpu_chunks_needed(tokens, limits)
    shared = "" if shared_tier_bytes is None else f", a shared tier of {shared_tier_bytes} bytes"
    return (
        f"the engines are too small for {DOCUMENTS} documents of {tokens} tokens: {limits.device_blocks} device "
        f"blocks, {limits.cpu_chunks} chunks in the CPU tier, context {limits.max_length}{shared}; run `make down` "
        f"and then `make up` with DEVICE_BLOCKS >= {blocks} and NUM_CPU_BLOCKS >= {chunks}"
    )
