"""Keys of vLLM's and vllm-ascend's own offload connectors, for configurations that were written for those."""

from __future__ import annotations

from collections.abc import Callable

# A variable that vllm-ascend's build reads; in a running container it does nothing.
BATCH_MEMCPY_VARIABLE = "VLLM_ASCEND_ENABLE_BATCH_MEMCPY"

# Their key -> the setting here, by its name in the connector, and what differs.
COUNTERPARTS = {
    "block_size": ("blocks_per_chunk", "which counts device blocks, not tokens"),
    "cpu_bytes_to_use_per_rank": ("cpu_bytes_to_use", "which is of all ranks together"),
    "kv_offloading_size": ("cpu_bytes_to_use", "which is in bytes, not GiB"),
    # These three the connector reads itself. Under the chart's keys they have other names.
    "cpu_bytes_to_use": ("cpu_bytes_to_use", "in the same bytes"),
    "offload_prompt_only": ("generated_tokens", "whose off is their true"),
    "secondary_tiers": ("shared_tier", "which names the one tier that engines share"),
}
# Their key -> why there is no setting for it.
WITHOUT_COUNTERPART = {
    "swap_in_threshold": "a prefix is loaded wherever that beats computing it, by measured rates",
    "store_threshold": "every complete chunk is stored",
    "lazy_offload": "chunks are stored as they are computed, beside the computation",
    "canonical_layout": "MLA's blocks are the same for every tensor parallel size, and heads are stored by rank",
    "enable_offload_prefix_caching": "prefixes in the CPU tier are always looked up",
}


def native_key_answer(key: str, name_here: Callable[[str], str]) -> str | None:
    """Return the answer to a key that those connectors know and this one does not; None for any other key.

    `name_here`: the name of the connector's settings in the place where this key was written.
    """
    if key in COUNTERPARTS:
        setting, difference = COUNTERPARTS[key]
        return f"a key of vLLM's own offload connectors; set {name_here(setting)}, {difference}"
    if key in WITHOUT_COUNTERPART:
        return f"a key of vLLM's own offload connectors, without one here, as {WITHOUT_COUNTERPART[key]}; remove it"
    return None
