"""An engine whose caches are reset and whose KV events are read: `engine_matrix.lifecycle_run FOLDER`, in a separate
process.

Prints `RUN {json}`: cached tokens of a prompt as it is asked after each reset, with its log-probabilities, and what the
published events say about its blocks.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from engine_matrix.engine_run import prepare, prompts, transfer_config
from engine_matrix.models import BLOCK_TOKENS, engine_settings, model

TOP_TOKENS = 20
_EVENTS_SECONDS = 60.0


class Events:
    """A subscription like a gateway's; events are decoded as the gateway decodes them."""

    def __init__(self, url: str) -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self._socket.connect(url)
        self.events: list[Any] = []
        self.undecodable = 0

    def wait(self, enough: Any) -> bool:
        from spillway_gateway.fleet.event_decoder import decode_batch, parse_live_frames

        deadline = time.monotonic() + _EVENTS_SECONDS
        while not enough(self.events) and time.monotonic() < deadline:
            if self._socket.poll(100):
                batch = decode_batch(parse_live_frames(self._socket.recv_multipart()).payload)
                self.events += batch.events
                self.undecodable += batch.undecodable
        return bool(enough(self.events))


def run(folder: Path) -> None:
    from vllm import LLM, SamplingParams

    from spillway_gateway.fleet.event_decoder import AllBlocksCleared, BlockStored, Tier

    wanted = model("llama")
    url = f"ipc://{folder}/events"
    events = Events(url)
    llm = LLM(
        **engine_settings(wanted, folder),
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": url,
            "topic": "kv-events",
        },
        kv_transfer_config=transfer_config("cpu", wanted, folder),
    )
    prompt = prompts(BLOCK_TOKENS)["a"]
    blocks = len(prompt) // BLOCK_TOKENS
    answers: dict[str, dict[str, Any]] = {}

    def ask(question: str) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, logprobs=TOP_TOKENS)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        logprobs = {str(token): one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
        answers[question] = {"cached": answer.num_cached_tokens or 0, "logprobs": logprobs}

    def stored(tier: Tier) -> list[BlockStored]:
        return [event for event in events.events if isinstance(event, BlockStored) and event.tier is tier]

    def step() -> None:
        """The scheduler's half reports the end of copies, and publishes, within a step."""
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)

    ask("first")
    step()
    step()
    both = events.wait(
        lambda _: all(
            sum(len(event.block_hashes) for event in stored(tier)) >= blocks for tier in (Tier.DEVICE, Tier.CPU)
        )
    )
    on_device = [block for event in stored(Tier.DEVICE) for block in event.block_hashes]
    in_tier = [block for event in stored(Tier.CPU) for block in event.block_hashes]
    tokens = [token for event in stored(Tier.DEVICE) for token in event.token_ids]

    assert llm.reset_prefix_cache()  # of the device
    ask("device reset")
    step()
    assert llm.reset_prefix_cache(reset_connector=True)
    ask("all reset")
    step()
    cleared = events.wait(lambda found: any(isinstance(event, AllBlocksCleared) for event in found))
    print(
        "RUN",
        json.dumps(
            {
                "answers": answers,
                "blocks": blocks,
                "both_tiers_published": both,
                "same_hashes": sorted(on_device[:blocks]) == sorted(in_tier[:blocks]),
                "tokens_match": tokens[: blocks * BLOCK_TOKENS] == prompt[: blocks * BLOCK_TOKENS],
                "clearing_published": cleared,
                "undecodable": events.undecodable,
            }
        ),
        flush=True,
    )
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    prepare([model("llama")])
    run(Path(sys.argv[1]))
