from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from spillway_connector.tiers.disk.slab.writers import WriterLease


def test_a_lease_is_held_until_its_release(tmp_path: Path) -> None:
    one, other = WriterLease(tmp_path), WriterLease(tmp_path)
    assert not other.is_held(one.number)
    one.acquire()
    one.acquire()  # as after the folder was removed
    assert other.is_held(one.number) and one.is_held(one.number)
    other.sweep()
    assert (tmp_path / f"{one.number:016x}").exists()
    one.release()
    one.release()
    assert not other.is_held(one.number)
    assert list(tmp_path.iterdir()) == []


def test_a_look_tells_a_lease_that_was_removed_from_one_that_has_ended(tmp_path: Path) -> None:
    lease, other = WriterLease(tmp_path, 5), WriterLease(tmp_path)
    lease.acquire()
    assert other.look(5) is True
    lease.release()
    assert (other.look(5), other.look(5)) == (False, False)
    other.remove(5)
    assert other.look(5) is None


def test_the_lease_of_a_killed_writer_ends_and_is_swept(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from spillway_connector.tiers.disk.slab.writers import WriterLease\n"
        "lease = WriterLease(Path(sys.argv[1])); lease.acquire(); print(lease.number, flush=True); time.sleep(1000)"
    )
    lease = WriterLease(tmp_path)
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        number = int(child.stdout.readline())
        assert lease.is_held(number)
        child.kill()
        child.wait()
        (tmp_path / "no number of ours").touch()
        lease.sweep()
        assert not (tmp_path / f"{number:016x}").exists()
        assert not lease.is_held(number)
