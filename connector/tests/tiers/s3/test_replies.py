"""Replies that no server can be brought to give at will: throttling, half objects, clocks, expired credentials."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spillway_connector.errors import (
    ConfigError,
    RefusedReason,
    TierPartlyAsked,
    TierRefused,
    TierTimeout,
    TierUnreachable,
)
from spillway_connector.limits import S3_CONNECTIONS
from spillway_connector.testing.replying_store import ReplyingStore, StoreRequest, replying_store
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.frame import build_header
from spillway_connector.tiers.s3 import client
from spillway_connector.tiers.s3 import tier as tier_module
from spillway_connector.tiers.s3.client import RETRIES_MAX, S3Client
from spillway_connector.tiers.s3.names import S3Names, parse_name, root_of
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.tiers.s3.tier import S3Tier
from spillway_connector.tiers.tier import StoreOutcome

BUCKET = "double"


@pytest.fixture
def store() -> Iterator[ReplyingStore]:
    with replying_store(NAMESPACE.document) as store:
        yield store


def tier_at(store: ReplyingStore, monkeypatch: pytest.MonkeyPatch, connections: int = S3_CONNECTIONS) -> S3Tier:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-to-be-shown")
    place = S3Place(BUCKET, endpoint=store.endpoint)
    return S3Tier(NAMESPACE, PAYLOAD_BYTES, place, connections=connections)


@pytest.fixture
def tier(store: ReplyingStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Tier]:
    tier = tier_at(store, monkeypatch)
    yield tier
    tier.close()


def _frame(seed: int) -> bytes:
    payload = payload_of(seed)
    return build_header(NAMESPACE.digest16, key_of(seed), payload, created_ms=1) + payload


def test_a_store_that_asks_to_slow_down_is_asked_again_after_pauses(store: ReplyingStore, tier: S3Tier) -> None:
    def slow_down_once(request: StoreRequest) -> None:
        if store.asked_for("GET") == 1:
            request.refuse(503, "SlowDown")
        else:
            request.reply(200, _frame(1))

    store.answer = slow_down_once
    assert load(tier, key_of(1)) == payload_of(1)
    assert store.asked_for("GET") == 2


@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
def test_one_that_goes_on_asking_to_slow_down_is_a_refusal_after_a_bounded_number(
    store: ReplyingStore, tier: S3Tier, operation: str
) -> None:
    store.answer = lambda request: request.refuse(503, "SlowDown")
    calls: dict[str, tuple[str, Callable[[], object]]] = {
        "lookup": ("HEAD", lambda: tier.contains([key_of(1)], soon())),
        "load": ("GET", lambda: load(tier, key_of(1))),
        "store": ("PUT", lambda: tier.store(key_of(1), payload_of(1), soon())),
    }
    command, call = calls[operation]
    refused = error_of(call)
    assert (type(refused), refused.reason) == (TierRefused, RefusedReason.THROTTLED)
    assert "fewer requests a second" in str(refused)
    assert store.asked_for(command) == RETRIES_MAX + 1


def test_a_pause_ends_at_the_deadline(store: ReplyingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE"):
        monkeypatch.setattr(client, name, timedelta(seconds=25))
    tier = tier_at(store, monkeypatch)
    tier.prepare(soon())
    store.answer = lambda request: request.refuse(503, "SlowDown")
    target = memoryview(bytearray(PAYLOAD_BYTES))
    assert isinstance(error_of(lambda: tier.load(key_of(1), target, time.monotonic() + 0.2)), TierTimeout)
    assert store.asked_for("GET") <= 1
    tier.close()


def test_a_store_that_does_not_answer_is_a_timeout(store: ReplyingStore, tier: S3Tier) -> None:
    tier.prepare(soon())
    answered = threading.Event()
    store.answer = lambda _: answered.wait() and None  # type: ignore[assignment,return-value]
    try:
        target = memoryview(bytearray(PAYLOAD_BYTES))
        assert isinstance(error_of(lambda: tier.load(key_of(1), target, time.monotonic() + 0.05)), TierTimeout)
        assert isinstance(error_of(lambda: tier.contains([key_of(1)], time.monotonic() + 0.05)), TierTimeout)
    finally:
        answered.set()


def test_what_has_arrived_of_a_load_is_known_before_it_ends(
    store: ReplyingStore, tier: S3Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "PIECE_BYTES", 1024)
    frame, rest = _frame(1), threading.Event()

    def answer(request: StoreRequest) -> None:
        request.reply(200, frame[: len(frame) // 2], announced=len(frame))
        request.wfile.flush()
        assert rest.wait(30)
        request.wfile.write(frame[len(frame) // 2 :])

    store.answer = answer
    loaded: list[bytes] = []
    loading = threading.Thread(target=lambda: loaded.append(load(tier, key_of(1))))
    loading.start()
    while not tier.received_bytes:
        assert loading.is_alive()
        loading.join(0.01)
    assert tier.received_bytes <= len(frame) // 2
    rest.set()
    loading.join()
    assert loaded == [payload_of(1)] and tier.received_bytes == len(frame)


def test_half_an_object_is_never_served(store: ReplyingStore, tier: S3Tier) -> None:
    """The reply announces a whole frame and the connection ends within it, every time."""
    frame = _frame(1)
    store.answer = lambda request: request.reply(200, frame[: len(frame) // 2], announced=len(frame))
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierUnreachable)


@pytest.mark.parametrize(
    ("status", "code", "reason", "words"),
    [
        (403, "RequestTimeTooSkewed", RefusedReason.CLOCK_SKEW, "the clock of this node"),
        (400, "ExpiredToken", RefusedReason.CREDENTIALS_EXPIRED, "the credentials have expired"),
        (403, "SignatureDoesNotMatch", RefusedReason.AUTHENTICATION, "does not accept these credentials"),
        (403, "AccessDenied", RefusedReason.PERMISSION, "s3:ListBucket"),
        (403, "QuotaExceeded", RefusedReason.NO_SPACE, "quota or the store's room is used up"),
        (507, "XMinioStorageFull", RefusedReason.NO_SPACE, "quota or the store's room is used up"),
        (400, "AuthorizationHeaderMalformed", RefusedReason.WRONG_REGION, "another region"),
        (400, "SomethingNew", RefusedReason.OTHER, "SomethingNew"),
    ],
)
def test_every_refusal_is_a_sentence_without_the_secret(
    store: ReplyingStore, tier: S3Tier, status: int, code: str, reason: RefusedReason, words: str
) -> None:
    store.answer = lambda request: request.refuse(status, code)
    for call in (lambda: load(tier, key_of(1)), lambda: tier.store(key_of(1), payload_of(1), soon())):
        refused = error_of(call)
        assert (type(refused), refused.reason) == (TierRefused, reason)
        assert words in str(refused)
        assert "never-to-be-shown" not in str(refused)


def test_credentials_that_expire_under_load_are_renewed_before_the_store_refuses_them(
    store: ReplyingStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pod's identity gives such credentials: the store takes the newest alone, and each expires after a minute."""
    given = 0

    def answer(request: StoreRequest) -> None:
        nonlocal given
        if request.path == "/credentials":
            given += 1
            expires = datetime.now(UTC) + timedelta(seconds=60)
            credentials = {"AccessKeyId": f"id-{given}", "SecretAccessKey": "s", "Token": "t"}
            document = credentials | {"Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ")}
            request.reply(200, json.dumps(document).encode())
        elif f"Credential=id-{given}/" in request.headers["Authorization"]:
            request.reply(200, _frame(1))
        else:
            request.refuse(400, "ExpiredToken")

    store.answer = answer
    (tmp_path / "token").write_text("of the service account")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    endpoint = store.endpoint
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{endpoint}/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    tier = S3Tier(NAMESPACE, PAYLOAD_BYTES, S3Place(BUCKET, endpoint=endpoint))
    try:
        tier.prepare(soon())
        before = given
        while given < before + 2:  # obstore leaves 0.1 s between two renewals
            assert load(tier, key_of(1)) == payload_of(1)
    finally:
        tier.close()


def test_a_lookup_that_may_not_list_is_told_apart_from_a_miss(store: ReplyingStore, tier: S3Tier) -> None:
    """AWS answers 403 about a missing object to those who may not list."""
    store.answer = lambda request: request.reply(403)
    refused = error_of(lambda: tier.contains([key_of(1)], soon()))
    assert refused.reason == RefusedReason.PERMISSION
    assert "s3:ListBucket" in str(refused)


def test_a_store_without_conditional_writes_is_written_to_without(store: ReplyingStore, tier: S3Tier) -> None:
    def no_conditions(request: StoreRequest) -> None:
        if request.headers.get("If-None-Match"):
            request.refuse(501, "NotImplemented")
        else:
            request.reply(200)

    store.answer = no_conditions
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    asked = store.asked_for("PUT")
    assert tier.store(key_of(2), payload_of(2), soon()) is StoreOutcome.STORED
    assert store.asked_for("PUT") == asked + 1, "it is known by then"


def test_no_operation_lists(store: ReplyingStore, tier: S3Tier) -> None:
    store.answer = lambda request: request.reply(200, _frame(1))
    tier.contains([key_of(1)], soon())
    load(tier, key_of(1))
    tier.store(key_of(1), payload_of(1), soon())
    tier.renew([key_of(1)], soon())
    tier.resident_bytes(soon())
    tier.discard(key_of(1), soon())
    assert all(path.startswith(f"/{BUCKET}/spillway1/") and "?" not in path for _, path in store.asked)


def test_requests_at_once_are_bounded(store: ReplyingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_at(store, monkeypatch, connections=3)
    lock = threading.Lock()
    now, most = 0, 0
    all_in = threading.Barrier(3)

    def count(request: StoreRequest) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        all_in.wait(30)  # three are under way at the same time
        with lock:
            now -= 1
        request.reply(404)

    store.answer = count
    try:
        assert tier.contains([key_of(seed) for seed in range(30)], soon()) == [False] * 30
    finally:
        tier.close()
    assert most == 3


def test_names_are_read_as_they_are_written() -> None:
    names = S3Names(root_of("kv/"), NAMESPACE.hex)
    found = parse_name("kv/spillway1", names.block(b"\x01\x02"))
    assert found is not None and (found.namespace, found.key) == (NAMESPACE.hex, b"\x01\x02")
    document = parse_name("kv/spillway1", names.document)
    assert document is not None and document.key is None
    for other in ("spillway1/x", f"kv/spillway1/{NAMESPACE.hex}/zz", f"kv/spillway1/{NAMESPACE.hex}/01/02", "kv/other"):
        assert parse_name("kv/spillway1", other) is None


def test_authorities_that_cannot_be_read_are_named() -> None:
    with pytest.raises(ConfigError, match="ca_file: /nothing cannot be read"):
        S3Client(S3Place(BUCKET, endpoint="https://127.0.0.1:1", ca_file="/nothing"), 1)


def test_a_lookup_beyond_the_bound_of_requests_says_what_it_has_not_asked_for(
    store: ReplyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-to-be-shown")
    store.answer = lambda request: request.reply(200)
    place = S3Place(BUCKET, endpoint=store.endpoint)
    tier = S3Tier(NAMESPACE, PAYLOAD_BYTES, place, gets_per_second_max=4, clock=lambda: 100.0)
    try:
        keys = [key_of(number) for number in range(32)]
        partly = error_of(lambda: tier.contains(keys, 101.0))
        assert isinstance(partly, TierPartlyAsked) and partly.reason is RefusedReason.QUEUE_AGE
        asked = sum(partly.found)
        assert 0 < asked < 32 and partly.found == [True] * asked + [False] * (32 - asked)
        assert store.asked_for("HEAD") == asked
        assert f"{32 - asked} of 32" in str(partly)
    finally:
        tier.close()


@pytest.mark.parametrize("said", ["A" * 100_000, "<Code>" + "B" * 100_000 + "</Code>"])
def test_no_reply_of_a_store_is_repeated_as_a_whole(store: ReplyingStore, tier: S3Tier, said: str) -> None:
    tier.prepare(soon())
    store.answer = lambda request: request.reply(400, f"<Error>{said}</Error>".encode())
    refused = error_of(lambda: load(tier, key_of(1)))
    assert isinstance(refused, TierRefused) and len(str(refused)) < 600
