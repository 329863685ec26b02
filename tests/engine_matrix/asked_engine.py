"""An engine in a process group of its own that is asked prompt by prompt and can be killed.

`python -m engine_matrix.asked_engine MODEL_FOLDER EXTRA_CONFIG EXECUTOR` is the process. EXTRA_CONFIG: JSON, the
connector's settings besides the name of its spec. EXECUTOR: uni (all in this process) or mp (the scheduler and the rank
each in a process of their own).

Each line of its input is a prompt, a JSON list of tokens; each line `ANSWER {json}` of its output has the answer as
reference_answers.margins.Scored reads it, and how many tokens of the prompt came from a cache. It ends with its input,
or is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_answers.margins import TOP, Scored

from engine_matrix.models import engine_settings, model
from spillway_connector.transfer_config import transfer_config

ANSWER_TOKENS = 4
_TESTS = Path(__file__).parent.parent


class EngineEnded(Exception):
    """The engine ended instead of answering."""


@dataclass(frozen=True, slots=True)
class Answer:
    """cached: tokens of the prompt that came from a cache."""

    scored: Scored
    cached: int

    @property
    def tokens(self) -> list[int]:
        return list(self.scored.tokens)


class AskedEngine:
    """block_tokens: as vLLM has made it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.block_tokens = int(self._line("READY"))

    def _line(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise EngineEnded(self._log.read_text()[-12_000:])

    def ask(self, prompt: list[int]) -> Answer:
        """Raises EngineEnded, as after kill() from another thread."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(prompt) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineEnded(str(error)) from error
        answer = json.loads(self._line("ANSWER"))
        return Answer(Scored.from_json(answer), answer["cached"])

    def kill(self) -> None:
        """All of its processes, as one container."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def asked_engine(folder: Path, extra: Mapping[str, Any], executor: str = "uni") -> Iterator[AskedEngine]:
    """A running engine of the model llama, which is built in the folder; killed at the end."""
    paths = os.pathsep.join([str(_TESTS), *sys.path])
    log = folder / f"engine-{executor}-{os.urandom(4).hex()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine_matrix.asked_engine", str(folder), json.dumps(extra), executor],
            env={**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield AskedEngine(process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(model_folder: str, extra: str, executor: str) -> None:
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
        "kv_transfer_config": transfer_config(json.loads(extra)),
        "distributed_executor_backend": executor,
    }
    engine = LLM(**settings)
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False, logprobs=TOP)
    print("READY", engine.llm_engine.vllm_config.cache_config.block_size, flush=True)
    for line in sys.stdin:
        (answer,) = engine.generate([{"prompt_token_ids": json.loads(line)}], greedy, use_tqdm=False)
        (output,) = answer.outputs
        tops = [{token: seen.logprob for token, seen in position.items()} for position in output.logprobs]
        found = {"tokens": list(output.token_ids), "tops": tops, "cached": answer.num_cached_tokens or 0}
        print("ANSWER", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
