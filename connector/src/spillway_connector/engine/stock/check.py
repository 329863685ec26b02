"""Check that a tier loads what an engine stored before it was restarted: `python -m
spillway_connector.engine.stock.check`.

For a machine with vLLM 0.30 or newer and a device that vLLM's own tiering serves (CUDA, or Ascend with vllm-ascend):

    python -m spillway_connector.engine.stock.check --model MODEL --tier '{"type": "spillway-nvme", "path": "/kv"}'

prints the `--kv-transfer-config` to serve with, starts an engine with it, asks a long prompt, ends the engine, starts
another one and asks again. Both answers have to be equal, and the second prompt has to come from the tier. `--print`
stops after the first step. Exit status 1: an answer differs, or nothing was loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_ANSWER_TOKENS = 16
_SETTLE_SECONDS = 1.0  # between the small requests during which an engine takes in finished stores
_SETTLE_REQUESTS = 5
_CHILD = "SPILLWAY_CHECK_ENGINE"  # holds the engine's arguments in the process of one engine


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    config = transfer_config(given)
    print(f"--kv-transfer-config '{json.dumps(config)}'", flush=True)
    if given.print:
        return 0
    engine = {"model": given.model, "kv_transfer_config": config, **json.loads(given.engine_args)}
    runs = []
    for name in ("stores", "loads after a restart"):
        print(f"an engine that {name} ...", flush=True)
        found = _run_engine(engine, given.tokens)
        if found is None:
            print(f"the engine that {name} failed; its log is above")
            return 1
        print(f"  {found['cached']} of {given.tokens} tokens came from a cache, {found['seconds']:.2f} s", flush=True)
        runs.append(found)
    first, second = runs
    if first["tokens"] != second["tokens"]:
        print(f"DIFFERENT answers: {first['tokens']} and {second['tokens']}; run it again with float32 to see whether")
        print("rounding explains it, and report it if not")
        return 1
    if not second["cached"]:
        print("NOTHING was loaded; look for 'namespace' in both logs: the two have to be equal")
        return 1
    print("the same answer, loaded from the tier")
    return 0


def transfer_config(given: argparse.Namespace) -> dict[str, Any]:
    """vLLM's, with the tier in its own tiering spec."""
    extra: dict[str, Any] = {"spec_name": given.spec, "cpu_bytes_to_use": given.cpu_bytes}
    if given.spec_module is not None:
        extra["spec_module_path"] = given.spec_module
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**extra, "secondary_tiers": [json.loads(given.tier)]},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spillway_connector.engine.stock.check", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--tier", required=True, help="an entry of secondary_tiers, as JSON")
    parser.add_argument("--spec", default="TieringOffloadingSpec", help="Ascend: NPUTieringOffloadingSpec")
    parser.add_argument("--spec-module", help="where a spec is that vLLM does not register itself")
    parser.add_argument("--cpu-bytes", type=int, default=4 << 30, help="of vLLM's CPU tier (default 4 GiB)")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default 4096)")
    parser.add_argument("--engine-args", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--print", action="store_true", help="print the configuration and start nothing")
    return parser


def _run_engine(engine: dict[str, Any], prompt_tokens: int) -> dict[str, Any] | None:
    """Run the engine in a process of its own, as after a restart. Returns None if it failed."""
    environment = {**os.environ, _CHILD: json.dumps({"engine": engine, "tokens": prompt_tokens})}
    command = [sys.executable, "-m", "spillway_connector.engine.stock.check"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if done.returncode or not answers:
        print(done.stdout)
        return None
    found: dict[str, Any] = json.loads(answers[-1].removeprefix("ANSWER "))
    return found


def _engine_process(asked: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(enable_prefix_caching=True, seed=0, **asked["engine"])
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompt = [100 + (7919 * place) % (vocabulary // 2) for place in range(asked["tokens"])]
    greedy = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    begun = time.monotonic()
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], greedy, use_tqdm=False)
    seconds = time.monotonic() - begun
    for number in range(_SETTLE_REQUESTS):
        time.sleep(_SETTLE_SECONDS)
        llm.generate([TokensPrompt(prompt_token_ids=[1, 2, 3 + number])], greedy, use_tqdm=False)
    found = {"tokens": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens or 0, "seconds": seconds}
    print("ANSWER", json.dumps(found), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    if _CHILD in os.environ:
        _engine_process(json.loads(os.environ.pop(_CHILD)))
    else:
        sys.exit(main())
