"""Both legs of a request between engines with vllm-ascend's own connector: its scheduler's class reads what the gateway
writes, and the gateway reads what it replies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import vllm_ascend
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.request import RequestStatus
from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_connector

from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.first_leg import first_leg_body, place_of, second_leg
from spillway_gateway.upstream.outbound import OutboundRequest

PROMPT, BLOCK = list(range(40)), 16
BODY = json.dumps({"model": "m", "prompt": PROMPT}).encode()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> mooncake_connector.MooncakeConnectorScheduler:
    for name in ("init_ascend_config", "get_ascend_config"):
        monkeypatch.setattr(mooncake_connector, name, MagicMock())
    config = MagicMock(speculative_config=None, additional_config={})
    config.model_config.hf_config = SimpleNamespace()
    config.cache_config.block_size = BLOCK
    config.kv_transfer_config.kv_port = 5000
    for size in ("tensor", "pipeline", "data", "prefill_context", "decode_context"):
        setattr(config.parallel_config, f"{size}_parallel_size", 1)
    config.parallel_config.data_parallel_rank = 0
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK), layer_names=["0"])
    return mooncake_connector.MooncakeConnectorScheduler(config, "engine-p", SimpleNamespace(kv_cache_groups=[group]))


def request(params: dict[str, Any], status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
    return SimpleNamespace(
        request_id="cmpl-1", prompt_token_ids=PROMPT, output_token_ids=[7], kv_transfer_params=params, status=status
    )


def first_params() -> dict[str, Any]:
    return json.loads(asyncio.run(first_leg_body(BODY, by_connector=True)))["kv_transfer_params"]


def reply(engine: Any, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> tuple[bool, bytes]:
    kept, params = engine.request_finished(request(first_params(), status), ([3, 4, 5],))
    return kept, json.dumps({"choices": [], "kv_transfer_params": params}).encode()


def test_a_prefill_engine_keeps_the_blocks_of_a_first_leg_and_the_decode_engine_asks_for_them(engine: Any) -> None:
    assert engine.get_num_new_matched_tokens(request(first_params()), 0) == (0, False)
    kept, answered = reply(engine)
    place = place_of(answered)
    assert kept and place is not None
    asked = OutboundRequest(b"/v1/completions", (), BODY, b"id", False, PromptBlocks([], BLOCK, 0, 0), 0.0)
    leg = json.loads(bytes(asyncio.run(second_leg(asked, place)).body))

    second = request(leg["kv_transfer_params"])
    assert engine.get_num_new_matched_tokens(second, 0) == (len(PROMPT), True)
    blocks = MagicMock()
    blocks.get_unhashed_block_ids_all_groups.return_value = blocks.get_block_ids.return_value = ([8, 9, 10],)
    engine.update_state_after_alloc(second, blocks, len(PROMPT))
    (read,) = engine.build_connector_meta(MagicMock()).requests.values()

    assert (read.remote_engine_id, read.remote_request_id, read.remote_port) == ("engine-p", "cmpl-1", 5000)
    assert [list(group) for group in read.remote_block_ids] == [[3, 4, 5]]
    assert read.num_prompt_blocks == 3


def test_a_first_leg_that_ends_otherwise_names_no_place(engine: Any) -> None:
    kept, answered = reply(engine, RequestStatus.FINISHED_STOPPED)
    assert not kept and place_of(answered) is None


def test_the_connector_has_the_name_that_the_documentation_gives() -> None:
    """MooncakeConnector stays vLLM's own, which has another protocol."""
    with contextlib.suppress(ValueError):  # another check has registered them
        vllm_ascend.register_connector()
    assert KVConnectorFactory._registry["MooncakeConnectorV1"]() is mooncake_connector.MooncakeConnector
    assert KVConnectorFactory._registry["MooncakeConnector"]().__module__.startswith("vllm.")
