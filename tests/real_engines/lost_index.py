"""The index of a store's slabs, cut or copied over under engines that serve from it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from reference_answers.margins import ROUNDING, difference

from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.layout import INDEX_NAME

from .fleet import Fleet

PART = "index"


def _cut(size: int) -> Callable[[Path, Path], None]:
    def cut(index: Path, kept: Path) -> None:
        with index.open("r+b") as file:
            file.truncate(size)

    return cut


def _copied(index: Path, kept: Path) -> None:
    subprocess.run(["cp", str(kept), str(index)], check=True)


def _zeros(index: Path, kept: Path) -> None:
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={index}", "bs=4096", f"count={index.stat().st_size // 4096}", "conv=notrunc"],
        check=True,
        capture_output=True,
    )


def _emptied(index: Path, kept: Path) -> None:
    subprocess.run(["sh", "-c", ': > "$0"', str(index)], check=True)


FAULTS: dict[str, Callable[[Path, Path], None]] = {
    "cut to 0 bytes": _cut(0),
    "cut to 4,096 bytes": _cut(4096),
    "emptied by a shell's >": _emptied,
    "an older copy over it by cp": _copied,
    "zeros over it": _zeros,
}


def run(fleet: Fleet) -> None:
    stack = fleet.stack
    engine = stack.engines[-1]
    known = [stack.compute_and_store(engine) for _ in range(2)]
    (index,) = stack.local.folder.nvme.glob(f"{SLAB_FOLDER}/*/{INDEX_NAME}")
    kept = stack.local.folder.config / "kept-index"
    shutil.copyfile(index, kept)
    known.append(stack.compute_and_store(engine))
    for name, fault in FAULTS.items():
        cores = fleet.cores()
        for each in stack.engines:
            each.reset_prefix_cache(cpu_tier=True)
        fault(index, kept)
        wrong, sources = [], []
        for one in known:
            for each in stack.engines:
                answer = each.ask(one.prompt.tokens)
                sources.append(answer.source)
                reference = one.by_cached_tokens.get(answer.cached_tokens, one.by_cached_tokens[0])
                mismatch = difference(reference, answer.scored, ROUNDING)
                wrong += [] if mismatch is None else [mismatch]
        stored = stack.compute_and_store(engine)
        again = stack.ask_shared(engine, stored).source
        lost = fleet.lost_since(cores)
        counts = ", ".join(f"{sources.count(source)} {source}" for source in dict.fromkeys(sources))
        seen = f"{len(wrong)} of {len(sources)} wrong ({counts}), {lost} engines lost; then stored and loaded: {again}"
        fleet.rows.add(PART, name, seen, not wrong and lost == 0 and again == "shared")
        for line in wrong:
            print("     ", line, flush=True)
