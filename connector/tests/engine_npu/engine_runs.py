"""The runs behind test_end_to_end.py, in a process of their own: `python engine_runs.py MODEL_FOLDER`.

vLLM binds threads to cores, reads its settings from the environment and keeps global state, none of which the test
process should inherit, and pass on to the engines that other tests start. Prints one JSON line per run.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    PYTHONHASHSEED="0",
    TORCH_COMPILE_DISABLE="1",
)

from acl_emulator import build
from acl_emulator.control import Emulator
from engine_matrix.greedy import greedy_answers
from engine_matrix.models import VOCABULARY, model
from engine_matrix.models import build as build_model

BLOCK_TOKENS = 32
DEVICE_BLOCKS = 20  # one and a half prompts, so that asking for another prompt evicts
PROMPT_BLOCKS = 12
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS + 5


def prompt(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)]


def answers(model: Path, extra_config: dict[str, Any] | None) -> dict[str, Any]:
    """The result of greedy_answers for prompts A, B, C, A, B, C and A, which evict one another."""
    transfer = extra_config and {
        "kv_connector": "SpillwayConnector",
        "kv_connector_module_path": "spillway_connector.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "EmulatedNpuSpec",
            "spec_module_path": "acl_emulator.engine_spec",
            "num_cpu_blocks": 64,
            "transport": "npu",
            "acl_library_path": str(build.library()),
            **extra_config,
        },
    }
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": DEVICE_BLOCKS * BLOCK_TOKENS,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_transfer_config": transfer,
    }
    return greedy_answers(settings, lambda _: [prompt(seed) for seed in (1, 2, 3, 1, 2, 3, 1)], answer_tokens=6)


def main(folder: Path) -> None:
    # Grouped queries, and random weights so large that answers depend on what attention reads.
    model_folder = build_model(model("llama"), folder)
    emulator = Emulator(build.library())
    cases: list[tuple[str, dict[str, Any] | None]] = [
        ("none", None),
        ("on", {"batch_memcpy": "on"}),
        ("off", {"batch_memcpy": "off"}),
        ("unsupported", {"batch_memcpy": "auto"}),
        ("faults", {"batch_memcpy": "auto"}),
    ]
    for name, extra_config in cases:
        emulator.reset()
        if name == "unsupported":
            os.environ["ACL_EMULATOR_BATCH"] = "unsupported"
        if name == "faults":
            # Every few calls something fails: refused copies, refused events.
            for nth in range(2, 60, 3):
                emulator.fail("aclrtMemcpyBatchAsync", nth, 207001)
            for nth in range(9, 60, 7):
                emulator.fail("aclrtRecordEvent", nth, 207001)
        run = answers(model_folder, extra_config)
        os.environ.pop("ACL_EMULATOR_BATCH", None)
        live = emulator.live()
        run |= {
            "name": name,
            "batch_calls": emulator.calls("aclrtMemcpyBatchAsync"),
            "single_calls": emulator.calls("aclrtMemcpyAsync"),
            "unpinned_copies": sum("Memcpy" in line and "pinned=0" in line for line in emulator.log()),
            "live": [live.streams, live.events, live.host_registrations],
        }
        print("RUN " + json.dumps(run), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
