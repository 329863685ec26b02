from __future__ import annotations

from pathlib import Path

import pytest

from spillway_connector.tiers.disk.layout_choice import file_system_of, layouts_in, suitable_mode, unused_layouts

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:25 / /mnt/shared\\040data rw - nfs4 server:/export rw
31 22 0:26 / /mnt/shared\\040data/cache rw shared:5 - xfs /dev/nvme0n1 rw
32 22 0:27 / /mnt/user rw - fuse.s3fs s3fs rw
34 22 0:28 / /mnt/array rw - dpc dpc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/cache", "ext4"),
        ("/mnt/shared data/kv", "nfs4"),
        ("/mnt/shared data/cache/kv", "xfs"),
        ("/mnt/shared databases", "ext4"),
        ("/mnt/user", "fuse.s3fs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("path", "mode", "reason"),
    [
        ("/var/cache/kv", "slab", "ext4 is a file system of one node"),
        ("/mnt/shared data/kv", "files", "nfs4 may be mounted by other nodes"),
        ("/mnt/shared data/cache/kv", "slab", "xfs is a file system of one node"),
        ("/mnt/user/kv", "files", "fuse.s3fs may be mounted by other nodes"),
        ("/mnt/array/kv", "files", "dpc is not known to be a file system of one node"),
    ],
)
def test_what_is_surely_one_nodes_gets_slabs_all_else_files(path: str, mode: str, reason: str, mounts: Path) -> None:
    assert suitable_mode(Path(path), mounts) == (mode, reason)


def test_no_list_of_mounts_no_slabs(tmp_path: Path) -> None:
    reason = f"its file system is not in {tmp_path / 'missing'}"
    assert suitable_mode(Path("/var/cache/kv"), tmp_path / "missing") == ("files", reason)


@pytest.mark.parametrize(
    ("inside", "mode"),
    [
        ("space.ledger", "files"),
        (f"{'0a' * 16}/partial/x", "files"),  # the ledger may be deleted at any time
        ("slab/lock", "slab"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_directory_stays_with_the_layout_it_was_begun_in(
    inside: str, mode: str, known: bool, tmp_path: Path, mounts: Path
) -> None:
    file = tmp_path / "kv" / inside
    file.parent.mkdir(parents=True)
    file.touch()
    if not known:
        mounts.write_text("")
    assert suitable_mode(tmp_path / "kv", mounts) == (mode, "the directory holds frames in it")


def test_slabs_that_were_moved_to_a_shared_file_system_are_not_used_there(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "kv" / "slab").mkdir(parents=True)
    mounts.write_text(f"22 1 0:25 / {tmp_path} rw - nfs4 server:/export rw\n")
    assert suitable_mode(tmp_path / "kv", mounts).mode == "files"


def test_a_link_to_a_shared_file_system_is_followed(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "share")
    mounts.write_text(f"{MOUNTS}33 22 0:25 / {tmp_path}/share rw - nfs4 server:/export rw\n")
    assert suitable_mode(tmp_path / "kv", mounts).mode == "files"


def test_a_place_that_cannot_be_looked_at_gets_what_a_new_directory_gets(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "kv").touch()  # a file, where scanning fails
    assert layouts_in(tmp_path / "kv") == set()
    assert suitable_mode(tmp_path / "kv", mounts).mode == "slab"


def test_both_layouts_are_seen(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "slab").mkdir()
    (tmp_path / "space.ledger").touch()
    assert layouts_in(tmp_path) == {"files", "slab"}
    assert suitable_mode(tmp_path, mounts).mode == "slab"
    assert unused_layouts(tmp_path, "slab", mounts) == {"files"}
    assert unused_layouts(tmp_path, "files", mounts) == {"slab"}
    mounts.write_text(f"22 1 0:25 / {tmp_path} rw - nfs4 server:/export rw\n")
    assert unused_layouts(tmp_path, "files", mounts) == set()
