"""One engine with the CPU tier of its node: `python -m node_tier.engine MODEL_FOLDER REGION_FOLDER EXECUTOR`.

EXECUTOR: uni (all in this process) or mp (the scheduler and the rank each in a process of their own).

Each line of its input is a prompt, a JSON list of tokens; each line `ANSWER {json}` of its output has the tokens of the
answer and how many tokens of the prompt came from a cache. It ends with its input, or is killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine_matrix.models import connector_config, engine_settings, model

ANSWER_TOKENS = 4


def transfer_config(region_folder: str) -> dict[str, Any]:
    return connector_config(
        {
            "spec_name": "SpillwayOffloadingSpec",
            "spec_module_path": "spillway_connector.engine.spec",
            "num_cpu_blocks": 8,
            "node_tier": {"bytes": "8MiB", "path": region_folder, "fallback": "refuse"},
        }
    )


def main(model_folder: str, region_folder: str, executor: str) -> None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if executor == "uni" else "1",
        VLLM_NO_USAGE_STATS="1",
        TORCH_COMPILE_DISABLE="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
    )
    from vllm import LLM, SamplingParams

    settings = engine_settings(model("llama"), Path(model_folder)) | {
        "seed": 0,
        "kv_transfer_config": transfer_config(region_folder),
        "distributed_executor_backend": executor,
    }
    engine = LLM(**settings)
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    print("READY", engine.llm_engine.vllm_config.cache_config.block_size, flush=True)
    for line in sys.stdin:
        (answer,) = engine.generate([{"prompt_token_ids": json.loads(line)}], greedy, use_tqdm=False)
        (output,) = answer.outputs
        found = {"tokens": list(output.token_ids), "cached": answer.num_cached_tokens or 0}
        print("ANSWER", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
