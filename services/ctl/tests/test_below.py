"""`spillway tier --below`: each store of a chain alone, and what a purge of one tenant leaves in both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ctl_media import TENANT, FileMedium, fill, left
from ctl_s3_medium import S3Medium
from s3_servers import KEYS, S3Server

from spillway_ctl.command import main


class Chain:
    """An NVMe tier of files above a bucket, as an engine's configuration names them."""

    def __init__(self, folder: Path, server: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
        self.above, self.below = FileMedium(folder / "kv"), S3Medium(server)
        self._capsys = capsys
        self.file = folder / "engine.yaml"
        place = self.below.place
        tier = {
            "type": "nvme",
            "nvme": {"path": str(folder / "kv")},
            "below": {"type": "s3"},
            "s3": {"bucket": place.bucket, "prefix": place.prefix, "endpoint": place.endpoint},
        }
        self.file.write_text(
            json.dumps({"model": {"path": "/m", "maxLength": 64}, "offload": {"numCpuBlocks": 8, "sharedTier": tier}})
        )

    def asked(self, command: str, *options: str) -> tuple[int, str]:
        """(exit status, what it printed)."""
        status = main(["tier", command, "--config", str(self.file), *options])
        return status, self._capsys.readouterr().out

    def frames(self, *options: str) -> int:
        status, said = self.asked("verify", "--json", *options)
        assert status == 0
        return int(json.loads(said)["frames"])


@pytest.fixture
def chain(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chain:
    for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), KEYS, strict=True):
        monkeypatch.setenv(name, value)
    chain = Chain(tmp_path, s3, capsys)
    fill(chain.above, range(2))
    fill(chain.above, range(2, 5), tenant=TENANT)
    fill(chain.below, range(4))
    fill(chain.below, range(4, 11), tenant=TENANT)
    return chain


def test_each_store_of_a_chain_is_looked_into_alone(chain: Chain) -> None:
    assert (chain.frames(), chain.frames("--below")) == (5, 11)
    assert (chain.frames("--tenant", TENANT.hex()), chain.frames("--below", "--tenant", TENANT.hex())) == (3, 7)
    for options, store, frames in (((), chain.above, 5), (("--below",), chain.below, 11)):
        status, said = chain.asked("status", "--json", *options)
        assert status == 0 and f'"frames": {frames}' in said
        assert len(list(store.store().frames(headers=False))) == frames


def test_a_tenant_is_purged_from_both_stores_by_one_command_for_each(chain: Chain) -> None:
    assert chain.asked("purge", "--tenant", TENANT.hex(), "--yes")[0] == 0
    assert (left(chain.above, range(11)), left(chain.below, range(11))) == ([0, 1], [*range(11)])
    assert chain.asked("purge", "--below", "--tenant", TENANT.hex(), "--yes")[0] == 0
    assert (left(chain.above, range(11)), left(chain.below, range(11))) == ([0, 1], [0, 1, 2, 3])


def test_below_needs_a_chain(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "status", "--below", "--nvme", "/nowhere"]) == 2
    assert "--below belongs to --config" in capsys.readouterr().err
    chain.file.write_text(chain.file.read_text().replace('"below": {"type": "s3"}', '"below": {"type": "none"}'))
    assert main(["tier", "status", "--below", "--config", str(chain.file)]) == 2
    assert "offload.sharedTier.below.type is none" in capsys.readouterr().err
