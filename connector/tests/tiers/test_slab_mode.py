from __future__ import annotations

from pathlib import Path

import pytest

from spillway_connector.tiers.slab_mode import file_system_of, suitable_mode

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:25 / /mnt/shared\\040data rw - nfs4 server:/export rw
31 22 0:26 / /mnt/shared\\040data/cache rw shared:5 - xfs /dev/nvme0n1 rw
32 22 0:27 / /mnt/user rw - fuse.s3fs s3fs rw
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


def test_local_disks_get_slabs_and_shared_ones_files(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert suitable_mode(Path("/var/cache/kv"), mounts) == "slab"
    assert suitable_mode(Path("/mnt/shared data/kv"), mounts) == "files"
    assert suitable_mode(Path("/mnt/user/kv"), mounts) == "files"
    assert suitable_mode(Path("/var/cache/kv"), tmp_path / "missing") == "files"


def test_a_directory_stays_with_the_mode_it_was_begun_in(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "space.ledger").touch()
    assert suitable_mode(tmp_path / "old", mounts) == "files"
    (tmp_path / "slabs" / "slab").mkdir(parents=True)
    mounts.write_text("")
    assert suitable_mode(tmp_path / "slabs", mounts) == "slab"
