"""Events that this interpreter's vLLM publishes about its blocks, from its own pool, request, hashes and classes.

`python -m engine_events` in the environment of each version writes a file from which the gateway's tests, which have no
vLLM, read bytes as engines of that version send them. No engine runs here: vLLM's block pool caches and evicts blocks,
makes the events, and its publisher's encoder encodes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import vllm
from vllm import SamplingParams
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK_TOKENS = 4
ADAPTER = "adapter-a"
SALT = "tenant-a"
_TIMESTAMP = 1000.0
_SAMPLES = Path(__file__).resolve().parents[2] / "gateway" / "tests" / "fleet" / "engine_samples"


@dataclass(frozen=True)
class Cached:
    """A prompt of which the engine has cached every block."""

    name: str
    tokens: list[int]
    salt: str | None = None
    lora: str | None = None


# The same tokens in four namespaces, and a prompt that shares its first two blocks with the first.
PROMPTS = (
    Cached("plain", list(range(100, 112))),
    Cached("longer", [*range(100, 108), *range(500, 508)]),
    Cached("salted", list(range(100, 112)), salt=SALT),
    Cached("adapted", list(range(100, 112)), lora=ADAPTER),
    Cached("salted and adapted", list(range(100, 112)), salt=SALT, lora=ADAPTER),
)
EVICTED = "plain"  # its last block leaves the device, and its first two go to the CPU tier


@dataclass
class Published:
    """One batch per step of the engine, and what each step did."""

    steps: list[str] = field(default_factory=list)
    batches: list[KVEventBatch] = field(default_factory=list)

    def encoded(self) -> list[bytes]:
        """Return the batches as vLLM's publisher encodes them."""
        encoder = msgspec.msgpack.Encoder()
        return [encoder.encode(batch) for batch in self.batches]

    def add(self, step: str, events: list[Any]) -> None:
        self.steps.append(step)
        self.batches.append(KVEventBatch(ts=_TIMESTAMP + len(self.batches), events=events, data_parallel_rank=0))


def published() -> Published:
    """Deterministic where PYTHONHASHSEED is set, which gives the first block its parent's hash."""
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    pool = BlockPool(64, enable_caching=True, hash_block_size=BLOCK_TOKENS, enable_kv_cache_events=True)
    result = Published()
    hashes: dict[str, list[bytes]] = {}
    blocks: dict[str, list[Any]] = {}
    for prompt in PROMPTS:
        lora = LoRARequest(prompt.lora, 1, "/adapters/" + prompt.lora) if prompt.lora else None
        request = Request(
            request_id=prompt.name,
            prompt_token_ids=prompt.tokens,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=prompt.salt,
            lora_request=lora,
            block_hasher=hasher,
        )
        hashes[prompt.name] = list(request.block_hashes)
        count = len(prompt.tokens) // BLOCK_TOKENS
        own = blocks[prompt.name] = pool.get_new_blocks(count)
        # In two steps, as chunked prefill does: the second event names a parent.
        for begin, end in ((0, 1), (1, count)):
            pool.cache_full_blocks(request, own, begin, end, BLOCK_TOKENS, 0)
            result.add(f"store {prompt.name}", pool.take_events())
    result.add("offload", list(_cpu_tier_events(hashes[EVICTED][:2])))
    pool.free_blocks(reversed(blocks[EVICTED]))
    pool.evict_blocks({blocks[EVICTED][-1].block_id})
    result.add(f"evict {EVICTED}", pool.take_events())
    result.add("evict from the CPU tier", [BlockRemoved(block_hashes=hashes[EVICTED][:2], medium="CPU")])
    for prompt in PROMPTS:
        if prompt.name != EVICTED:
            pool.free_blocks(blocks[prompt.name])
    assert pool.reset_prefix_cache(), "no block is in use"
    result.add("reset", pool.take_events())
    return result


def _cpu_tier_events(hashes: list[bytes]) -> Iterator[BlockStored]:
    """Yield the CPU tier's events as vLLM's offloading connector sends them: whole hashes, and no tokens."""
    yield BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[],
        lora_id=None,
        block_size=0,
        medium="CPU",
        lora_name=None,
    )


def version() -> str:
    """The version of this vLLM, without the suffix of its build."""
    return vllm.__version__.partition("+")[0]


def sample_path() -> Path:
    """Path of the file that keeps the bytes of this version."""
    return _SAMPLES / f"vllm-{version()}.json"


def sample() -> dict[str, Any]:
    """Return the content of sample_path(): the prompts, and each step with its batch in hexadecimal digits."""
    result = published()
    steps = [{"step": step, "batch": batch.hex()} for step, batch in zip(result.steps, result.encoded(), strict=True)]
    return {
        "vllm": version(),
        "block_tokens": BLOCK_TOKENS,
        "prompts": [asdict(prompt) for prompt in PROMPTS],
        "steps": steps,
    }
