"""Commands on a bucket, as far as it differs from other stores: its name, the age of its blocks, its measured rates."""

from __future__ import annotations

import json

import pytest
from ctl_media import ONE, TENANT, fill
from ctl_s3_medium import S3Medium
from s3_servers import KEYS, S3Server

from spillway_connector.errors import TierError
from spillway_ctl import tier_rates
from spillway_ctl.command import main
from spillway_ctl.tier_rates import PIECE_BYTES, measure_bucket


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Medium:
    for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), KEYS, strict=True):
        monkeypatch.setenv(name, value)
    return S3Medium(s3)


def test_rates_are_measured_and_nothing_of_it_stays(
    bucket: S3Medium, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(bucket, range(2), ONE)
    monkeypatch.setattr(tier_rates, "PIECES", 3)
    rates = measure_bucket(bucket.place, 30.0)
    assert rates.size_bytes == 3 * PIECE_BYTES
    assert rates.write_bytes_per_second > 0 and rates.read_bytes_per_second > 0
    assert main(["tier", "status", *bucket.options, "--json"]) == 0
    assert '"frames": 2' in capsys.readouterr().out
    assert len(list(bucket.store().frames(headers=False))) == 2


def test_the_age_of_a_block_is_that_of_its_object(bucket: S3Medium, capsys: pytest.CaptureFixture[str]) -> None:
    fill(bucket, range(3))
    fill(bucket, range(3, 5), tenant=TENANT)

    def verified(*filters: str) -> int:
        assert main(["tier", "verify", *bucket.options, "--json", *filters]) == 0
        return int(json.loads(capsys.readouterr().out)["frames"])

    assert verified("--newer-than", "1d") == 5
    assert verified("--newer-than", "1d", "--tenant", TENANT.hex()) == 2
    assert verified("--older-than", "1d") == 0


def test_doctor_says_what_the_store_says(
    bucket: S3Medium, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(TierError, match="does not accept these credentials"):
        measure_bucket(bucket.place, 30.0)
    assert main(["doctor", "--engine", "http://127.0.0.1:1", *bucket.options]) == 1
    assert "does not accept these credentials" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--s3", "bucket"], "write s3://BUCKET"),
        (["--s3", "s3://ab"], "write s3://BUCKET"),
        (["--nvme", "/nowhere", "--s3-region", "eu"], "--s3-region belongs to --s3"),
        (["--s3", "s3://bucket", "--password-env", "X"], "--password-env is for Redis; this tier is a bucket"),
    ],
)
def test_what_is_no_bucket_is_said(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "status", *options]) == 2
    assert words in capsys.readouterr().err


def test_the_tier_of_an_engines_configuration_is_found(bucket: S3Medium, tmp_path, capsys) -> None:
    fill(bucket, range(3), ONE)
    file = tmp_path / "engine.yaml"
    place = bucket.place
    file.write_text(
        f"model: {{path: /m, maxLength: 64}}\noffload: {{numCpuBlocks: 8, sharedTier: {{type: s3, s3: {{bucket: "
        f"{place.bucket}, prefix: {place.prefix}, endpoint: '{place.endpoint}'}}}}}}\n"
    )
    assert main(["tier", "status", "--config", str(file), "--json"]) == 0, capsys.readouterr().err
    assert '"frames": 3' in capsys.readouterr().out
