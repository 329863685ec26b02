"""Two adapters of one name and one NVMe folder, in a separate process: `engine_matrix.adapter_run FOLDER`.

Three engines, one after the other. The first has no connector and gives the reference for each adapter. The second
stores the KV of a prompt with the adapter `support` and loads it again. The third has other weights under that name,
then gets the first ones by a reload in place. Prints `RUN {json}` for each question: cached tokens, and the logprobs of
the tokens that may follow the prompt.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from engine_matrix.engine_run import prepare, prompts, transfer_config
from engine_matrix.models import BLOCK_TOKENS, Model, engine_settings, model
from engine_matrix.own_engine import OwnEngine

_RANK = 8
_KNOWN_SECONDS = 60.0
NAME = "support"


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the matrix's llama: random weights of all attention projections, in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    rng = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": (128, 128), "k_proj": (128, 64), "v_proj": (128, 64), "o_proj": (128, 128)}
    tensors = {}
    for layer in range(4):
        for name, (inputs, outputs) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(_RANK, inputs, generator=rng) / inputs**0.5
            tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, _RANK, generator=rng)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


class Engine(OwnEngine):
    def __init__(self, wanted: Model, folder: Path, case: str) -> None:
        super().__init__(
            **engine_settings(wanted, folder),
            enable_lora=True,
            max_loras=1,
            max_lora_rank=_RANK,
            kv_transfer_config=transfer_config(case, wanted, folder),
        )

    def load(self, folder: Path, **options: Any) -> Any:
        """The adapter of this folder, loaded under the one name; returns once its digest is computed."""
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(NAME, 1, str(folder), **options)
        assert self.llm.llm_engine.add_lora(adapter)
        adapter = LoRARequest(NAME, 1, str(folder))
        deadline = time.monotonic() + _KNOWN_SECONDS
        while self.connector is not None and self.connector.adapters.of(adapter).key is None:
            assert time.monotonic() < deadline, "the adapter's digest was not computed"
            time.sleep(0.01)
        return adapter

    def finish_stores(self) -> None:
        """A step collects the workers' copies; then the tier's threads finish."""
        from vllm import SamplingParams

        self.llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=2, detokenize=False))
        for tier in self.connector.connector_scheduler.manager.secondary_tiers:
            assert tier._shared.drain(60.0)


def run(folder: Path) -> None:
    wanted = model("llama")
    ours, theirs = write_adapter(folder / "ours", seed=1), write_adapter(folder / "theirs", seed=2)
    prompt = prompts(BLOCK_TOKENS)["a"]

    plain = Engine(wanted, folder, "none")
    plain.ask("plain, ours", prompt, lora_request=plain.load(ours))
    assert plain.llm.reset_prefix_cache()
    plain.ask("plain, theirs", prompt, lora_request=plain.load(theirs, load_inplace=True))
    plain.ask("plain, ours in place of theirs", prompt, lora_request=plain.load(ours, load_inplace=True))
    plain.end()

    first = Engine(wanted, folder, "nvme")
    first.ask("first, ours", prompt, lora_request=first.load(ours))
    first.finish_stores()
    assert first.llm.reset_prefix_cache()  # of the device
    first.ask("first, ours again", prompt, lora_request=first.load(ours))
    first.end()

    second = Engine(wanted, folder, "nvme")
    second.ask("second, theirs", prompt, lora_request=second.load(theirs))
    second.ask("second, ours in place of theirs", prompt, lora_request=second.load(ours, load_inplace=True))
    second.end()


if __name__ == "__main__":
    prepare([model("llama")])
    run(Path(sys.argv[1]))
