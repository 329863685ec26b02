"""Paths of frames in the file layout, and walks over them. A folder that vanishes meanwhile is empty."""

from __future__ import annotations

import os
from collections.abc import Iterator

from spillway_connector.own_files import remove_empty_folder
from spillway_connector.tiers.disk.root import PARTIAL_NAME, entries_in, folders_in

FRAME_SUFFIX = ".kv"
FRAME_DEPTH = 4  # <namespace hex>/ab/cd/<key hex>.kv below the root, see own_files.py
PARTIAL_DEPTH = 3  # <namespace hex>/partial/<name>


def frame_path(namespace_folder: str | os.PathLike[str], key_hex: str) -> str:
    """Path of a key's frame: below two folders named after the key's first two bytes."""
    return f"{namespace_folder}/{key_hex[:2]}/{key_hex[2:4] or '00'}/{key_hex}{FRAME_SUFFIX}"


def key_of_path(path: str) -> str:
    """Return the key, in hex, of a frame's path."""
    return os.path.basename(path).removesuffix(FRAME_SUFFIX)


def frames_in(namespace_folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the frames of one namespace, without those being written."""
    for first in folders_in(namespace_folder):
        if first.name == PARTIAL_NAME:
            continue
        for second in folders_in(first.path):
            yield from (entry for entry in entries_in(second.path) if entry.name.endswith(FRAME_SUFFIX))


def remove_empty_parents(path: str, levels: int = 2) -> None:
    """Remove the folders of a removed frame while they are empty: each costs a page. A writer makes them again.

    levels: 1 for the inner one alone, which is what a writer can make again without a race.
    """
    folder = os.path.dirname(path)
    for level in range(levels):
        if not remove_empty_folder(folder, FRAME_DEPTH - 1 - level):
            return
        folder = os.path.dirname(folder)
