"""Spillway's connector beside another in vLLM's MultiConnector: `engine_matrix.combined_run FOLDER`, in a separate
process with an EngineCore of its own, as a server has it.

The other one is vLLM's ExampleConnector, which keeps each prompt's KV in files and knows nothing of weights. Prints
`RUN {json}`: log-probabilities and cached tokens of one prompt by question, and what reached the API process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from engine_matrix.engine_run import prepare, prompts, transfer_config
from engine_matrix.lifecycle_run import TOP_TOKENS, Events
from engine_matrix.models import BLOCK_TOKENS, engine_settings, model


def halve_weights(worker: Any) -> None:
    """Halve the weights in place, as a trainer may do."""
    for parameter in worker.model_runner.model.parameters():
        parameter.data.mul_(0.5)


class Engine:
    """One engine with both connectors, in the order of their names."""

    def __init__(self, folder: Path, order: tuple[str, ...], events_url: str, *, statistics: bool = False) -> None:
        from vllm import LLM

        wanted = model("llama")
        ours = transfer_config("cpu", wanted, folder)
        assert ours is not None
        connectors = {
            "ours": ours,
            "other": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(folder / "other")},
            },
        }
        self._folder = folder
        self.llm = LLM(
            # Statistics of one engine alone: a process registers each series once.
            **(engine_settings(wanted, folder) | {"disable_log_stats": not statistics}),
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events_url,
                "topic": "kv-events",
            },
            kv_transfer_config={
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"connectors": [connectors[name] for name in order]},
            },
        )

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, logprobs=TOP_TOKENS)
        (answer,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        logprobs = {str(token): one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
        for _ in range(2):  # the end of copies is reported within a step
            short = SamplingParams(max_tokens=2, detokenize=False)
            self.llm.generate([{"prompt_token_ids": [3, 4, 5]}], short, use_tqdm=False)
        return {"cached": answer.num_cached_tokens or 0, "logprobs": logprobs}

    def forget(self, *, ours: bool = False, other: bool = False) -> None:
        """Drop what the device holds, and the named connectors' KV."""
        assert self.llm.reset_prefix_cache(reset_connector=ours)
        if other:
            shutil.rmtree(self._folder / "other", ignore_errors=True)

    def end(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def run(folder: Path) -> None:
    from prometheus_client import REGISTRY

    from spillway_gateway.fleet.event_decoder import BlockStored, Tier

    prompt = prompts(BLOCK_TOKENS)["a"]
    blocks = len(prompt) // BLOCK_TOKENS
    answers: dict[str, dict[str, Any]] = {}

    url = f"ipc://{folder}/events"
    events = Events(url)
    engine = Engine(folder, ("ours", "other"), url, statistics=True)
    answers["computed"] = engine.ask(prompt)
    shutil.copytree(folder / "other", folder / "kept")
    engine.forget(other=True)
    answers["loaded by ours"] = engine.ask(prompt)
    engine.forget(other=True)
    engine.llm.collective_rpc(halve_weights)
    answers["after a change of weights"] = engine.ask(prompt)
    engine.forget(ours=True, other=True)
    answers["computed with other weights"] = engine.ask(prompt)
    published = events.wait(
        lambda found: (
            sum(len(event.block_hashes) for event in found if isinstance(event, BlockStored) and event.tier is Tier.CPU)
            >= 2 * blocks
        )
    )
    series = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    engine.end()

    # What the other one stored with the first weights, for an engine that asks it first.
    shutil.rmtree(folder / "other", ignore_errors=True)
    (folder / "kept").rename(folder / "other")
    reversed_order = Engine(folder, ("other", "ours"), f"ipc://{folder}/events-2")
    answers["loaded by the other"] = reversed_order.ask(prompt)
    reversed_order.forget(other=True)
    answers["loaded by ours what the other had loaded"] = reversed_order.ask(prompt)
    reversed_order.end()
    found = {"answers": answers, "blocks": blocks, "published": published, "series": sorted(series)}
    print("RUN", json.dumps(found), flush=True)


if __name__ == "__main__":
    prepare([model("llama")])
    # An EngineCore of its own, and functions as RPCs: halve_weights.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    run(Path(sys.argv[1]))
