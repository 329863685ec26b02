"""Weights of an engine changed in place, in a separate process: `engine_matrix.weights_run FOLDER`.

The matrix's llama with two sets of weights, A and B. An engine without a connector is started with B and gives the
references. Then one with a CPU tier and an NVMe tier starts with A and gets B by `reload_weights`, with prompts that
were asked before, between the change and a reset, and across both. At last it gets B, A and B again, each with its
name, and is asked one prompt. Prints `RUN {json}` for each question: cached
tokens, and the logprobs of the tokens that may follow the prompt.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

from engine_matrix.engine_run import PROMPT_BLOCKS, prepare, transfer_config
from engine_matrix.models import BLOCK_TOKENS, VOCABULARY, Model, build, engine_settings, model
from engine_matrix.own_engine import OwnEngine

WAYS = ("device alone", "with the connector", "with running requests", "pause")


def write_weights(place: Path, seed: int) -> None:
    """Replace the weights by others of the same shapes."""
    import torch
    from safetensors.torch import load_file, save_file

    rng = torch.Generator().manual_seed(seed)
    tensors = load_file(place / "model.safetensors")
    changed = {
        name: torch.randn(one.shape, generator=rng).to(one.dtype) * one.float().std().clamp(min=0.02)
        if one.dim() == 2
        else one
        for name, one in tensors.items()
    }
    save_file(changed, place / "changed", metadata={"format": "pt"})
    (place / "changed").replace(place / "model.safetensors")


def prompt(name: str) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(3, VOCABULARY) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS + 5)]


class Engine(OwnEngine):
    def __init__(self, wanted: Model, folder: Path, case: str) -> None:
        super().__init__(**engine_settings(wanted, folder), kv_transfer_config=transfer_config(case, wanted, folder))

    def begin(self, name: str, tokens: list[int], steps: int) -> None:
        """A request that runs on until it is stepped on."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        for _ in range(steps):
            self.llm.llm_engine.step()

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def reset(self, way: str) -> None:
        core = self.llm.llm_engine.engine_core.engine_core
        if way == "pause":
            core.pause_scheduler("keep", True)
            core.resume_scheduler()
        else:
            running = way == "with running requests"
            assert self.llm.reset_prefix_cache(running, way == "with the connector")

    def name(self, version: str | None) -> None:
        named = self.llm.llm_engine.engine_core.engine_core.spillway_weights(version)
        assert named["known"] and named["refused"] is None and named["version"] == version, named

    def store(self) -> None:
        """Bring what was computed last into the shared tier: the step of another prompt reports its copy."""
        self.ask("another", prompt("another"))
        (tier,) = self.connector.connector_scheduler.manager.secondary_tiers
        assert tier._shared.drain(30.0)


def run(folder: Path) -> None:
    wanted = model("llama")
    other = folder / "other"
    shutil.copytree(build(wanted, folder), other / wanted.name)
    write_weights(other / wanted.name, seed=1)
    names = [f"{when}, {way}" for way in WAYS for when in ("before", "between", "across")] + ["named"]
    plain = Engine(wanted, other, "none")
    for name in names:
        plain.ask(f"B: {name}", prompt(name))
    plain.end()

    shutil.copytree(folder / wanted.name, folder / "kept")
    engine = Engine(wanted, folder, "nvme")
    for way in WAYS:
        before, between, across = (f"{when}, {way}" for when in ("before", "between", "across"))
        engine.ask(f"old: {before}", prompt(before))
        engine.begin(across, prompt(across), steps=3)
        shutil.copy(other / wanted.name / "model.safetensors", folder / wanted.name / "copied")
        (folder / wanted.name / "copied").replace(folder / wanted.name / "model.safetensors")
        engine.llm.collective_rpc("reload_weights")
        if way not in ("with running requests", "pause"):
            engine.finish()
        engine.begin(f"again {before}", prompt(before), steps=2)
        engine.begin(f"again {between}", prompt(between), steps=2)
        if way not in ("with running requests", "pause"):
            engine.finish()
        engine.reset(way)
        engine.finish()
        for name in (before, between, across):
            engine.ask(f"new: {name}", prompt(name))
        engine.reset("device alone")
        for name in (before, between, across):
            engine.ask(f"asked again: {name}", prompt(name))
        shutil.copy(folder / "kept" / "model.safetensors", folder / wanted.name / "copied")
        (folder / wanted.name / "copied").replace(folder / wanted.name / "model.safetensors")
        engine.llm.collective_rpc("reload_weights")
        engine.reset("device alone")
    engine.name(None)
    engine.ask("named: A", prompt("named"))
    engine.store()
    for name, source, version in (
        ("B", other / wanted.name, "step-1"),
        ("A again", folder / "kept", None),
        ("B again", other / wanted.name, "step-1"),
    ):
        shutil.copy(source / "model.safetensors", folder / wanted.name / "copied")
        (folder / wanted.name / "copied").replace(folder / wanted.name / "model.safetensors")
        engine.llm.collective_rpc("reload_weights")
        engine.name(version)
        engine.ask(f"named: {name}", prompt("named"))
        engine.store()
    engine.end()


if __name__ == "__main__":
    prepare([model("llama")])
    run(Path(sys.argv[1]))
