"""Faults of the shared directory and of the files in it, and how to end them."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stack_driver.faulty_folders import full, read_only, replaced_by_file
from stack_driver.running_stack import RunningStack
from stack_driver.shared_stores import NvmeStore

from soak.damage import DAMAGES, MAGIC, pairs, torn
from soak.schedule import Fault

DAMAGED_SHARE = 0.3
SLAB_FOLDER = "slab"


class FolderFaults:
    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self._folder = stack.local.folder.nvme

    @contextmanager
    def strike(self, fault: Fault) -> Iterator[None]:
        """The fault lasts as long as the block. Files stay damaged until an engine finds out."""
        chance = random.Random(fault.seed)
        if fault.kind.startswith("files_"):
            self._damage(fault.kind.removeprefix("files_"), chance)
            yield
            return
        if fault.kind == "folder_removed":
            shutil.rmtree(self._folder, ignore_errors=True)  # engines write into it meanwhile
            yield
            return
        self._folder.mkdir(exist_ok=True)  # after a removal it may not have been made again
        if fault.kind == "folder_full":
            with full(self._stack, self._folder):
                yield
        else:
            with {"folder_read_only": read_only, "folder_replaced": replaced_by_file}[fault.kind](self._folder):
                yield

    def _damage(self, what: str, chance: random.Random) -> None:
        if (self._folder / SLAB_FOLDER).is_dir():
            damage_slabs(self._folder / SLAB_FOLDER, what, chance)
            return
        files = NvmeStore(self._folder).files()
        chosen = chance.sample(files, max(1, int(len(files) * DAMAGED_SHARE))) if files else []
        if what == "swapped":
            for one, other in pairs([str(file) for file in chosen], chance):
                swap(Path(one), Path(other))
            return
        for file in chosen:
            try:
                if what == "deleted":
                    file.unlink()
                else:
                    _rewrite(file, DAMAGES[what](file.read_bytes(), chance))
            except FileNotFoundError:
                continue  # evicted meanwhile


def swap(one: Path, other: Path) -> None:
    """Each gets the other's name, as a repair tool that mixed up its list would do."""
    aside = one.with_name(f"{one.name}.aside")
    try:
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
    except FileNotFoundError:
        aside.unlink(missing_ok=True)  # evicted meanwhile


def damage_slabs(folder: Path, what: str, chance: random.Random) -> None:
    """The same for slots of slabs (docs/formats.md). What takes a file away there takes the index, which is allowed."""
    if what == "deleted":
        for index in folder.glob("*/index"):
            index.unlink(missing_ok=True)
        return
    slots = [
        (chunk, offset, int(chunk.parent.name))
        for chunk in sorted(folder.glob("*/*.slab"))
        for offset in range(0, chunk.stat().st_size, int(chunk.parent.name))
    ]
    chance.shuffle(slots)
    frames = [(place, frame) for place in slots if (frame := _slot(*place)).startswith(MAGIC)]
    chosen = frames[: max(2, int(len(frames) * DAMAGED_SHARE))]
    if what == "swapped":
        for (one, first), (other, second) in zip(chosen[::2], chosen[1::2], strict=False):
            _write_slot(one, second[: one[2]])
            _write_slot(other, first[: other[2]])
        return
    damage = torn if what == "truncated" else DAMAGES[what]
    for place, frame in chosen:
        _write_slot(place, damage(frame, chance))


def _slot(chunk: Path, offset: int, slot_bytes: int) -> bytes:
    with chunk.open("rb") as file:
        file.seek(offset)
        return file.read(slot_bytes)


def _write_slot(place: tuple[Path, int, int], content: bytes) -> None:
    with place[0].open("r+b") as file:
        file.seek(place[1])
        file.write(content)


def _rewrite(file: Path, content: bytes) -> None:
    """Overwrite a file in place, so that an engine that reads right now reads a mixture; never make one that was
    evicted meanwhile."""
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)
