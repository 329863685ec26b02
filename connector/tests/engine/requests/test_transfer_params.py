"""No value that a client can write as kv_transfer_params raises on the scheduler's thread; only known ones count."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine import connector_base
from spillway_connector.engine.requests.tenancy import TenantContext
from spillway_connector.engine.requests.transfer_params import accepted
from spillway_connector.testing.generation import (
    SpillwayConnectorScheduler,
    SpillwayTieringManager,
    make_cpu_tier,
    patch_vllm,
    scheduler_half,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import request_of
from spillway_connector.testing.vllm_parts import part_of

BLOCK_TOKENS = 16
KNOWN = {
    "spillway_session": {"id": "8f0c", "ended": True, "return_seconds": 30},
    "spillway_hand_over": True,
    "max_offload_tokens": 0,
    "max_load_tokens": 64,
    "kv_load_tiers": [{"medium": "cpu"}, {"medium": "storage", "locality": "remote"}],
}
FOREIGN = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_host": "169.254.169.254",
    "remote_port": 80,
    "remote_block_ids": [1, 2, 3],
    "remote_engine_id": "other",
    "remote_kv_source": {"host": "169.254.169.254"},
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=80)
    | st.just("x" * 1_000_000)
    | st.just(10**400)
)
names = st.sampled_from([*KNOWN, *FOREIGN, "id", "ended", "return_seconds", "medium", "locality"]) | st.text(max_size=3)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=12) | st.dictionaries(names, inner, max_size=6), max_leaves=20
)
mappings = st.dictionaries(names, json_values, max_size=6)


@pytest.fixture(scope="module")
def half() -> Iterator[SpillwayConnectorScheduler]:
    region = unnamed_region(4, 4096)
    manager = SpillwayTieringManager(
        make_cpu_tier(4, region, "lru", enable_events=False),
        [],
        4,
        ConnectorConfig.parse({"num_cpu_blocks": 4}),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    yield scheduler_half(manager, [attention])
    region.cleanup()


def a_request(params: object) -> Any:
    request = request_of(
        "r", [b"h" * 32], tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, status=RequestStatus.FINISHED_STOPPED
    )
    request.kv_transfer_params = params  # type: ignore[assignment]
    return request


@given(json_values | mappings)
@example("boom")
@example(["do_remote_prefill"])
@example(7)
@example({"kv_load_tiers": [["medium"]]})
@example({"kv_load_tiers": [{"medium": {}, "locality": []}]})
@example({"spillway_session": "boom"})
@example({"spillway_session": {"id": {}, "return_seconds": 10**400}})
@example({"max_offload_tokens": 10**400})
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_scheduler_s_half_takes_in_any_value(half: SpillwayConnectorScheduler, params: object):
    request = a_request(params)

    half.on_new_request(request)

    assert request.kv_transfer_params is (params if isinstance(params, dict) else None)
    context = half._req_status["r"].req_context
    assert isinstance(context, TenantContext)
    assert context.kv_transfer_params is None or context.kv_transfer_params.keys() <= KNOWN.keys()
    half.request_finished(request)


def test_a_value_of_another_form_is_not_logged(half: SpillwayConnectorScheduler, caplog: pytest.LogCaptureFixture):
    """A request could write megabytes to the log if it were."""
    huge = "x" * 1_000_000
    request = a_request({"max_offload_tokens": huge, "max_load_tokens": huge, "kv_load_tiers": [huge] * 1_000})

    with caplog.at_level(logging.DEBUG):
        half.on_new_request(request)

    half.request_finished(request)
    assert sum(len(record.getMessage()) for record in caplog.records) < 10_000


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_member_counts_and_others_do_not(name: str):
    assert accepted({name: KNOWN[name], **FOREIGN}) == {name: KNOWN[name]}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        FOREIGN,
        {"max_offload_tokens": -1},
        {"max_offload_tokens": True},
        {"max_load_tokens": 1.0},
        {"kv_load_tiers": "cpu"},
        {"kv_load_tiers": [{"medium": "cpu"}] * 1_000},
        {"kv_load_tiers": [{"medium": "c" * 1_000}]},
        {"spillway_session": {"id": "s" * 1_000}},
        {"spillway_hand_over": 1},
    ],
    ids=lambda params: json.dumps(params)[:40],
)
def test_what_is_of_no_known_form_is_nothing(params: object):
    assert accepted(params) is None


class Ours:
    pass


@pytest.fixture
def preprocess(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's method with the filter, on an engine with the connector that is given."""

    def original(self: Any, request: Any) -> tuple[Any, int]:
        return request, 0

    monkeypatch.setattr(EngineCore, "preprocess_add_request", original)
    monkeypatch.setattr(connector_base, "ConnectorBase", Ours)
    patch_vllm("transfer-params")
    patch_vllm("transfer-params")

    def run(connector: object, params: object) -> object:
        core = part_of(EngineCore, scheduler=part_of(Scheduler, connector=connector))
        request, wave = core.preprocess_add_request(a_request(params))
        assert wave == 0
        return request.kv_transfer_params

    return run


def together(*connectors: object) -> MultiConnector:
    return part_of(MultiConnector, _connectors=list(connectors))


def test_an_engine_takes_in_known_members_alone(preprocess: Any):
    """Members are dropped before the engine's scheduler sees them, which reads some itself."""
    assert preprocess(Ours(), {**KNOWN, **FOREIGN}) == KNOWN
    assert preprocess(Ours(), FOREIGN) is None


def test_beside_other_connectors_their_members_pass(preprocess: Any):
    assert preprocess(together(object(), Ours()), FOREIGN) == FOREIGN


@pytest.mark.parametrize("params", ["boom", 7, 1.5, True, ["do_remote_prefill"]])
def test_what_is_no_mapping_reaches_no_connector(preprocess: Any, params: object):
    assert preprocess(Ours(), params) is None
    assert preprocess(together(object(), Ours()), params) is None
    assert preprocess(object(), params) is params  # an engine without Spillway's connector is left as it was
