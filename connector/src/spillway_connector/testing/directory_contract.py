"""The contract of a tier in a directory that others may write to: subclass it beside :class:`TierContract`.

``medium`` has ``root``, the directory, and ``frame_bytes``, what a frame takes of it. ``make_tier`` takes the tier's
other arguments and another ``root``. ``read_only`` is a folder (``path``) that ``freeze()`` makes read-only.
A *foreigner* takes the place of a file or folder of the store; whatever it is, nothing outside the store is read,
changed or made, no call waits for it, and no wrong byte is served.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from spillway_connector.errors import RefusedReason, TierCorrupt, TierError
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    PATIENCE_SECONDS,
    PAYLOAD_BYTES,
    MakeTier,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.disk.shared_bound import BOUNDS_FOLDER
from spillway_connector.tiers.tier import NO_TENANT, EvictionReason, Tier

SECRET = b"a file of the node, not of the store\n" * 200
_FRAMES = 4


class DirectoryMedium(Protocol):
    root: Path
    frame_bytes: int


class ReadOnly(Protocol):
    path: Path

    def freeze(self) -> None: ...


class Victims:
    """Files and folders of the node, and whether anything has happened to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def file(self, size: int | None = None) -> Path:
        """A new one; size: as large as what it stands in for."""
        path = self.folder / f"file-{len(list(self.folder.iterdir()))}"
        path.write_bytes(SECRET if size is None else (SECRET * (size // len(SECRET) + 1))[:size])
        return path

    def seen(self) -> dict[str, tuple[object, ...]]:
        """Kind, mode, times and contents of everything there, but not how many names it has."""
        found: dict[str, tuple[object, ...]] = {}
        for path in [self.folder, *sorted(self.folder.rglob("*"))]:
            status = path.lstat()
            contents = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
            found[str(path)] = (status.st_mode, status.st_mtime_ns if contents is not None else 0, contents)
        return found


def a_link(place: Path, victims: Victims) -> None:
    place.symlink_to(victims.file())


def a_link_to_a_file_of_its_size(place: Path, victims: Victims, size: int = 0) -> None:
    place.symlink_to(victims.file(size))


def a_link_to_nothing_yet(place: Path, victims: Victims) -> None:
    place.symlink_to(victims.folder / "to-be-made")


def a_link_to_a_device(place: Path, victims: Victims) -> None:
    place.symlink_to("/dev/zero")


def a_hard_link(place: Path, victims: Victims) -> None:
    os.link(victims.file(), place)


def a_fifo(place: Path, victims: Victims) -> None:
    os.mkfifo(place)


def a_socket(place: Path, victims: Victims) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{place.name}")  # a path of a socket may have 107 bytes
        finally:
            os.close(folder)


def a_folder(place: Path, victims: Victims) -> None:
    place.mkdir()
    (place / "something").write_bytes(b"in it")


FOREIGNERS: tuple[Callable[[Path, Victims], None], ...] = (
    a_link,
    a_link_to_nothing_yet,
    a_link_to_a_device,
    a_hard_link,
    a_fifo,
    a_socket,
    a_folder,
)


class DirectoryContract:
    """Every promise about what others put into the directory."""

    writes_by_name = True  # so an open tier, too, is refused in a folder that has become read-only

    def test_a_foreigner_in_the_place_of_any_file_is_neither_read_nor_changed_nor_waited_for(
        self, make_tier: MakeTier, medium: DirectoryMedium, tmp_path: Path
    ) -> None:
        victims = Victims(tmp_path / "node")
        _filled(make_tier, medium)
        for place in list(_kinds_of_files(medium.root)):
            for foreigner in FOREIGNERS:
                tier = _filled(make_tier, medium)
                if not place.is_file():
                    continue  # a name that changes
                size = place.stat().st_size
                place.unlink()
                foreigner(place, victims)
                if foreigner is a_link:
                    place.unlink()
                    a_link_to_a_file_of_its_size(place, victims, size)
                before = victims.seen()
                _use(tier, f"{foreigner.__name__} for {place.name}, open")
                _use(make_tier(NAMESPACE, PAYLOAD_BYTES), f"{foreigner.__name__} for {place.name}, opened")
                assert victims.seen() == before, f"{foreigner.__name__} for {place.name}"
                assert not (victims.folder / "to-be-made").exists()

    def test_a_link_in_the_place_of_any_folder_leads_nowhere(
        self, make_tier: MakeTier, medium: DirectoryMedium, tmp_path: Path
    ) -> None:
        victims = Victims(tmp_path / "node")
        _filled(make_tier, medium)
        folders = [path for path in sorted(medium.root.rglob("*")) if path.is_dir()]
        for number, folder in enumerate(folders):
            tier = _filled(make_tier, medium)
            if not folder.is_dir() or folder.is_symlink():
                continue
            aside = victims.folder / f"folder-{number}"
            folder.rename(aside)  # so that every name that is looked for is found
            for index in range(3):
                (aside / f"{index}-of-the-node").write_bytes(SECRET)
            folder.symlink_to(aside)
            before = victims.seen()
            _use(tier, f"a link for {folder.name}, open", may_fail=True)
            _use(make_tier(NAMESPACE, PAYLOAD_BYTES), f"a link for {folder.name}, opened", may_fail=True)
            assert _without_mapped(victims.seen()) == _without_mapped(before), folder
            if folder.is_symlink():
                folder.unlink()
                aside.rename(folder)
                for index in range(3):
                    (folder / f"{index}-of-the-node").unlink()

    def test_the_smallest_bound_of_the_running_engines_counts_for_all(
        self, make_tier: Callable[..., Tier], medium: DirectoryMedium, caplog: Any
    ) -> None:
        clock = SteppedClock()
        never, small_bytes = clock() + 1e7, 2 << 20
        large = make_tier(NAMESPACE, PAYLOAD_BYTES, max_bytes=4 << 20, clock=clock)

        def store(tier: Tier, first: int, count: int) -> None:
            for seed in range(first, first + count):
                tier.store(key_of(seed), payload_of(seed), never)

        store(large, 0, 150)
        assert _bytes_below(medium.root) > small_bytes
        assert "smallest" not in caplog.text
        small = make_tier(NAMESPACE, PAYLOAD_BYTES, max_bytes=small_bytes, clock=clock)
        store(small, 200, 5)
        _touch(medium.root / BOUNDS_FOLDER)
        for first in range(300, 340, 10):
            store(large, first, 10)
            assert _bytes_below(medium.root) <= small_bytes
            clock.advance(61.0)
        assert caplog.text.count("the smallest counts for all") == 1
        small.close()
        clock.advance(61.0)
        store(large, 400, 150)
        assert _bytes_below(medium.root) > small_bytes

    def test_a_tenant_makes_room_for_itself(self, make_tier: Callable[..., Tier], medium: DirectoryMedium) -> None:
        clock = SteppedClock()
        never = clock() + 1e7
        options: dict[str, Any] = {"tenant_max_bytes": 5 * medium.frame_bytes, "clock": clock}
        tiers = [make_tier(NAMESPACE, PAYLOAD_BYTES, **options) for _ in range(2)]
        quiet, loud, salted = range(4), range(100, 130), range(200, 230)

        def present(tier: Tier, seeds: range) -> list[int]:
            found = tier.contains([key_of(seed) for seed in seeds], never)
            return [seed for seed, there in zip(seeds, found, strict=True) if there]

        for seed in quiet:
            tiers[0].store(key_of(seed), payload_of(seed), never, b"quiet---")
        for first, second in zip(loud, salted, strict=True):  # two engines take turns, and the bound is one for both
            clock.advance(1)
            tiers[first % 2].store(key_of(first), payload_of(first), never)
            tiers[second % 2].store(key_of(second), payload_of(second), never, b"loud----")
            for seeds in (loud, salted):
                assert len(present(tiers[0], seeds)) <= 5
        assert present(tiers[1], loud) == list(loud)[-5:]
        assert present(tiers[1], salted) == list(salted)[-5:]
        assert present(tiers[1], quiet) == list(quiet)
        assert sum(tier.evictions[EvictionReason.TENANT] for tier in tiers) == 50
        assert all(tier.evictions[EvictionReason.ROOM] == 0 and not tier.under_pressure for tier in tiers)

    def test_a_quota_that_holds_no_frame_is_refused_with_the_remedy(
        self, make_tier: Callable[..., Tier], medium: DirectoryMedium
    ) -> None:
        tier = make_tier(NAMESPACE, PAYLOAD_BYTES, tenant_max_bytes=medium.frame_bytes - 1)
        for tenant in (NO_TENANT, b"tenant-a"):
            error = error_of(lambda tenant=tenant: tier.store(key_of(1), payload_of(1), soon(), tenant))  # type: ignore[misc]
            assert error.reason == RefusedReason.NO_SPACE
            assert "raise tenant_max_bytes" in str(error)

    def test_a_read_only_folder_serves_what_it_holds(self, make_tier: Callable[..., Tier], read_only: ReadOnly) -> None:
        root = read_only.path / "kv"
        before = make_tier(NAMESPACE, PAYLOAD_BYTES, root=root)
        before.store(key_of(1), payload_of(1), soon())
        read_only.freeze()
        for tier in (before, make_tier(NAMESPACE, PAYLOAD_BYTES, root=root)):
            assert load(tier, key_of(1)) == payload_of(1)
            assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
            if tier is not before or self.writes_by_name:
                error = error_of(lambda tier=tier: tier.store(key_of(2), payload_of(2), soon()))  # type: ignore[misc]
                assert error.reason in (RefusedReason.READ_ONLY, RefusedReason.PERMISSION)
            assert load(tier, key_of(1)) == payload_of(1)

    def test_a_file_in_the_place_of_the_directory_is_named(self, make_tier: MakeTier, medium: DirectoryMedium) -> None:
        medium.root.write_text("not a directory")
        error = error_of(lambda: make_tier(NAMESPACE, PAYLOAD_BYTES).prepare(soon()))
        assert "is a file; give a directory" in str(error)
        assert medium.root.read_text() == "not a directory"

    def test_names_that_are_known_beforehand_are_not_written_through(
        self, make_tier: MakeTier, medium: DirectoryMedium, tmp_path: Path
    ) -> None:
        """A tier's temporary names are not written through a link that has them already."""
        victims = Victims(tmp_path / "node")
        _filled(make_tier, medium)
        for place in list(_kinds_of_files(medium.root)):
            for name in (f"{place.name}.new", f"probe-{os.getpid()}-{threading.get_ident()}"):
                with suppress(FileExistsError):
                    a_link(place.with_name(name), victims)
        before = victims.seen()
        for place in list(medium.root.rglob("*")):
            if place.name in ("index", "headers", "sessions"):
                place.unlink()
        _use(make_tier(NAMESPACE, PAYLOAD_BYTES), "links at known names")
        assert victims.seen() == before


def _touch(folder: Path) -> None:
    """Show its last change as one of a later tick of the kernel's clock."""
    later_ns = folder.stat().st_mtime_ns + 10**9
    os.utime(folder, ns=(later_ns, later_ns))


def _bytes_below(root: Path) -> int:
    """Bytes that a bound counts in either layout: frames, chunks and what lies beside chunks."""
    return sum(sizes_below(root, lambda path: path.suffix in (".kv", ".slab") or "slab" in path.parts))


def sizes_below(root: Path, counts: Callable[[Path], bool]) -> list[int]:
    """Bytes of each file now; a maintenance thread may remove files and folders meanwhile."""
    sizes = []
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            if counts(path):
                with suppress(FileNotFoundError):
                    sizes.append(path.lstat().st_size)
    return sizes


def _filled(make_tier: MakeTier, medium: DirectoryMedium) -> Tier:
    tier = make_tier(NAMESPACE, PAYLOAD_BYTES)
    for seed in range(_FRAMES):
        tier.store(key_of(seed), payload_of(seed), soon())
    return tier


def _kinds_of_files(root: Path) -> Iterator[Path]:
    """One of each kind of file that a store has: of several frames or chunks, the first."""
    kinds: set[tuple[int, str]] = set()
    for path in sorted(root.rglob("*")):
        kind = (len(path.relative_to(root).parts), path.suffix or path.name[:5])
        if path.is_file() and not path.is_symlink() and kind not in kinds:
            kinds.add(kind)
            yield path


def _without_mapped(seen: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Leave out the store's own files that lie there now: a process that had them open may go on with them."""
    return {path: facts for path, facts in seen.items() if path.endswith("-of-the-node")}


def _use(tier: Tier, what: str, *, may_fail: bool = False) -> None:
    """Every operation on every key, in a thread that must come back. After two rounds the tier serves."""
    wrong: list[object] = []

    def work() -> None:
        for _ in range(2):
            for seed in range(_FRAMES):
                key, stored = key_of(seed), payload_of(seed)
                for call in (
                    lambda key=key: tier.contains([key], soon()),
                    lambda key=key: tier.contains_now([key]),
                    lambda key=key, stored=stored: tier.store(key, stored, soon()),
                    lambda: tier.resident_bytes(soon()),
                ):
                    with suppress(TierError):
                        call()
                try:
                    if load(tier, key) != stored:
                        wrong.append(seed)
                except TierError as error:
                    if isinstance(error, TierCorrupt):
                        with suppress(TierError):
                            tier.discard(key, soon())
        if may_fail:
            return
        for seed in range(_FRAMES):
            if load(tier, key_of(seed)) != payload_of(seed):
                wrong.append(seed)

    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive(), f"{what}: a call does not come back"
    assert not failed, f"{what}: {failed[0]!r}"
    assert wrong == [], what
