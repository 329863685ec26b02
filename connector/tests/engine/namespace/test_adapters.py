"""KV of a request with a LoRA adapter is that of the adapter's weights, whatever the adapter is called."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import LoRAConfig
from vllm.distributed.kv_events import BlockStored
from vllm.lora.ops.torch_ops.lora_ops import sgmv_shrink
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.namespace.adapters import (
    KEY_BYTES,
    AdapterLoads,
    AdapterRegistry,
    adapter_of,
    adapter_state,
)
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.generation import (
    SharedTierAdapter,
    SpillwayConnectorScheduler,
    SpillwayTieringManager,
    make_cpu_tier,
    patch_vllm,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import new_request
from spillway_connector.testing.vllm_parts import part_of

BLOCK_TOKENS, BLOCKS, ROWS = 16, 4, 32
TOKENS = BLOCK_TOKENS * BLOCKS


class StepExecutor(Executor):
    """Runs what was submitted when the test asks for it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()


class EngineProcess:
    """One engine's process as far as adapters go: vLLM's EngineCore and hashes, our scheduler half, no model.

    Workers that load adapters when vLLM asks them to, from the files as they are then.
    """

    def __init__(self, scheduler: SpillwayConnectorScheduler) -> None:
        patch_vllm("adapter-loads", "adapter-of-request", "adapter-version-in-hash")
        self.half = scheduler
        self.digests = StepExecutor()
        self.adapters = scheduler.adapters = AdapterRegistry(executor=self.digests)
        self.core = part_of(
            EngineCore,
            scheduler=part_of(Scheduler, connector=self),
            model_executor=part_of(UniProcExecutor, add_lora=lambda request: True),
            mm_receiver_cache=None,
        )
        hash_fn = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_fn)
        self.core.request_block_hasher = get_request_block_hasher(BLOCK_TOKENS, hash_fn)

    @contextmanager
    def adapter_loading(self, request: LoRARequest) -> Iterator[None]:
        with self.adapters.loading(request):
            yield
        self.half.fail_stores_of_replaced_adapters()

    def load(self, adapter: LoRARequest) -> None:
        """The RPC, and the digest that follows in the background."""
        self.core.add_lora(adapter)
        self.digests.run()

    def request(self, name: str, adapter: LoRARequest | None, tokens: int = TOKENS) -> Request:
        sent = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(range(tokens)),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=adapter,
            cache_salt=None,
            data_parallel_rank=None,
        )
        made, _ = self.core.preprocess_add_request(sent)
        return made

    def matched(self, name: str, adapter: LoRARequest | None) -> int | None:
        """Tokens that a new request is offered; it is then computed as far as it was not."""
        request = self.request(name, adapter)
        self.half.on_new_request(request)
        tokens, _ = self.half.get_num_new_matched_tokens(request, 0)
        if tokens:
            self.half.request_finished(request)
        return tokens

    def matched_in_store(self, name: str, adapter: LoRARequest) -> int:
        """Tokens that a new request is offered once the shared tier, asked at every step, has answered and loaded."""
        request = self.request(name, adapter)
        self.half.on_new_request(request)
        while (tokens := self.half.get_num_new_matched_tokens(request, 0)[0]) is None:
            self.step({})
            self.half.manager.secondary_tiers[0]._shared.wait_for_progress(1.0)
        return tokens

    def compute(self, name: str, adapter: LoRARequest | None) -> list[int]:
        """One step with all of a new request, which is not in the device cache; returns its store jobs."""
        assert not self.matched(name, adapter)
        return self.step({name: TOKENS}, new={name: [1, 2, 3, 4]})

    def step(self, scheduled: dict[str, int], new: dict[str, list[int]] | None = None) -> list[int]:
        requests = [new_request(name, blocks) for name, blocks in (new or {}).items()]
        output = step_output(scheduled, requests, running=[name for name in scheduled if name not in (new or {})])
        jobs = list(self.half.build_connector_meta(output).store_jobs)
        for name, tokens in scheduled.items():
            self.half._req_status[name].req.num_computed_tokens += tokens
        return jobs

    def report(self, jobs: list[int], loaded: dict[int, set[bytes | None]] | None = None) -> None:
        adapters = {lora_int_id: frozenset(states) for lora_int_id, states in (loaded or {}).items()}
        meta = SpillwayWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1), adapters=adapters)
        self.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


@pytest.fixture(autouse=True)
def one_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the hash seed, as all engines of a store do; without it, each engine's hashes begin with bytes of its own."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with open_engine() as opened:
        yield opened


@contextmanager
def open_engine(store: Path | None = None) -> Iterator[EngineProcess]:
    """store: a directory that several engines share; what they compute differs in nothing but adapters."""
    region = unnamed_region(ROWS, 4096)
    cpu_tier, tiers = make_cpu_tier(ROWS, region, "lru", enable_events=True), []
    if store is not None:
        geometry = ChunkGeometry(rank_block_bytes=4096, blocks_per_chunk=1, num_ranks=1)
        spec: Any = SimpleNamespace(geometry=geometry, namespace=Namespace.of({"model": "one"}), announces_blocks=True)
        limits = {"lookup_timeout_seconds": 60.0, "load_timeout_seconds": 60.0, "store_timeout_seconds": 60.0}
        options = {"path": str(store), "max_bytes": 1 << 26} | limits
        tiers.append(SharedTierAdapter(spec, cpu_tier.get_kv_memoryview(), "nvme", **options))
    manager = SpillwayTieringManager(
        cpu_tier,
        tiers,
        ROWS,
        ConnectorConfig.parse(
            {"num_cpu_blocks": ROWS, "prefill_tokens_per_second": 1e-3, "request_wait_seconds": 60.0}
        ),
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
    )
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    try:
        yield EngineProcess(scheduler_half(manager, [spec]))
    finally:
        manager.shutdown()
        region.cleanup()


def write_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    partial = folder / "partial"  # another file under the same name: as a download replaces it
    partial.write_bytes(weights)
    partial.replace(folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", b"ours")


def adapter(folder: Path, lora_int_id: int = 1, **options: Any) -> LoRARequest:
    return LoRARequest("support", lora_int_id, str(folder), **options)


def keys_of(engine: EngineProcess, name: str) -> list[bytes]:
    return list(engine.half._req_status[name].group_states[0].offload_keys)


def test_one_name_and_other_weights_are_other_keys(engine: EngineProcess, tmp_path: Path, folder: Path):
    """Engines with one store and one adapter name ask it for the same keys only if the adapter's weights are equal."""
    theirs = write_adapter(tmp_path / "theirs", b"theirs")
    seen = set()
    for number, place in enumerate((folder, theirs, write_adapter(tmp_path / "copy", b"ours"))):
        other = EngineProcess(engine.half)
        other.load(adapter(place))
        other.compute(f"r{number}", adapter(place))
        keys = keys_of(other, f"r{number}")
        assert len(keys) == BLOCKS
        seen.update(key[-4 - KEY_BYTES : -4] for key in keys)  # before it vLLM's hash, in 0.32 with the folder's name
    assert len(seen) == 2  # the copy is the same adapter


def test_two_engines_with_one_store_and_one_adapter_name(tmp_path: Path, folder: Path):
    store, theirs = tmp_path / "kv", write_adapter(tmp_path / "theirs", b"theirs")
    with open_engine(store) as first:
        first.load(adapter(folder))
        first.report(first.compute("writer", adapter(folder)))
        assert first.half.manager.secondary_tiers[0]._shared.drain(60.0)
    with open_engine(store) as second:
        second.load(adapter(theirs))
        assert second.matched_in_store("theirs", adapter(theirs)) == 0
        second.load(adapter(folder, load_inplace=True))
        assert second.matched_in_store("reloaded", adapter(folder)) == TOKENS, "its weights are those of the first"
    with open_engine(store) as third:
        third.load(adapter(folder))
        assert third.matched_in_store("ours", adapter(folder)) == TOKENS


def test_an_engine_that_was_reloaded_shares_with_one_that_loads_once(tmp_path: Path, folder: Path):
    """Chunks are shared, whichever engine stores and whichever loads, and whatever each has loaded before."""
    store, trained = tmp_path / "kv", write_adapter(tmp_path / "trained", b"trained on")
    with open_engine(store) as reloaded:
        reloaded.load(adapter(trained))
        for place in (folder, trained):
            reloaded.load(adapter(place, load_inplace=True))
            reloaded.report(reloaded.compute(f"writer {place.name}", adapter(place)))
        assert reloaded.half.manager.secondary_tiers[0]._shared.drain(60.0)
        writer = reloaded.request("device", adapter(trained))
        assert adapter_of(writer).number == 2, "the device's own cache still tells the loads apart"
    for place in (folder, trained):
        with open_engine(store) as fresh:
            fresh.load(adapter(place))
            assert fresh.matched_in_store("reader", adapter(place)) == TOKENS


def test_keys_of_a_reloaded_adapter_grow_with_the_request(engine: EngineProcess, tmp_path: Path, folder: Path):
    engine.load(adapter(write_adapter(tmp_path / "before", b"before")))
    engine.load(adapter(folder, load_inplace=True))
    request = engine.request("answer", adapter(folder), tokens=TOKENS - 1)
    engine.half.on_new_request(request)
    engine.half.get_num_new_matched_tokens(request, 0)
    request.append_output_token_ids(7)
    engine.half._req_status["answer"].update_offload_keys()

    assert len(keys_of(engine, "answer")) == BLOCKS
    assert len(set(keys_of(engine, "answer"))) == BLOCKS


def test_where_only_adapters_are_computed_rightly_nothing_else_is_stored(engine: EngineProcess, folder: Path):
    """CPUs may compute KV of the base model with an adapter, which would be stored, and shared, as the model's own."""
    engine.half._stores_adapters_alone = True
    engine.load(adapter(folder))

    assert engine.compute("adapter", adapter(folder))
    assert not engine.compute("base", None)


def test_vllm_s_cpu_kernels_take_tokens_without_an_adapter_for_the_last_adapter_s():
    """CPU engines with adapters store nothing of the base model because of this. vLLM has mended it in 0.33, whose
    engine has no build for CPUs."""
    weights = torch.stack([torch.zeros(1, 3, 8), torch.ones(1, 3, 8)])  # of two adapters
    output = torch.zeros(2, 3)
    no_adapter, last_adapter = -1, 1
    of_request = torch.tensor([no_adapter, last_adapter])
    one_token = torch.tensor([1, 1])
    sgmv_shrink(torch.ones(2, 8), weights, output, torch.tensor([0, 1]), one_token, of_request, 2, 1, 2, 1.0)

    mended = tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 33)
    assert torch.equal(output[0], output[1]) is not mended


def test_an_adapters_kv_is_found_again(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    engine.report(engine.compute("writer", adapter(folder)))
    assert engine.matched("reader", adapter(folder)) == TOKENS
    assert engine.matched("base", None) == 0


@pytest.mark.parametrize("lora_int_id", [1, 2])
def test_a_reload_under_the_same_name_is_another_adapter(engine: EngineProcess, folder: Path, lora_int_id: int):
    """A reload is in place (the same id), or the adapter is unloaded and loaded again (another id), from one folder."""
    engine.load(adapter(folder))
    engine.report(engine.compute("writer", adapter(folder)))
    write_adapter(folder, b"trained on")
    engine.load(adapter(folder, lora_int_id, load_inplace=lora_int_id == 1))
    assert engine.matched("reader", adapter(folder, lora_int_id)) == 0


def test_a_reload_of_the_same_files_is_the_same_adapter(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    engine.report(engine.compute("writer", adapter(folder)))
    engine.load(adapter(folder, 2))
    assert engine.matched("reader", adapter(folder, 2)) == TOKENS


def test_the_device_s_cache_tells_reloads_apart_too(engine: EngineProcess, tmp_path: Path, folder: Path):
    """vLLM's hash has the name alone, so its device blocks would be hit by requests of the weights that came later."""
    engine.load(adapter(folder))
    hashes = [engine.request("first", adapter(folder)).block_hashes]
    for content in (b"trained on", b"ours"):
        write_adapter(folder, content)
        engine.load(adapter(folder, load_inplace=True))
        hashes.append(engine.request("later", adapter(folder)).block_hashes)
    assert all(one[0] != other[0] for one in hashes for other in hashes if one is not other)
    made = engine.request("named", adapter(folder))
    extra, _ = generate_block_hash_extra_keys(made, 0, BLOCK_TOKENS, 0)
    assert extra[0][:2] == ("lora", "support")
    assert extra[1:] == (("lora", "weights 2"),)
    other_name = LoRARequest("sales", 7, str(folder))
    (only,) = generate_block_hash_extra_keys(engine.request("x", other_name), 0, BLOCK_TOKENS, 0)[0]
    assert only[:2] == ("lora", "sales")


def test_no_salt_is_an_adapter(engine: EngineProcess, folder: Path):
    """A client writes any salt at an engine's own port; vLLM 0.23 hashes it and an adapter's name alike."""
    engine.load(adapter(folder))
    of_adapter = engine.request("adapter", adapter(folder))
    salted = engine.request("salted", None)
    for salt in ("support", "lora", "('lora', 'support')", '["lora","support"]'):
        salted.cache_salt = salt
        salted_keys, _ = generate_block_hash_extra_keys(salted, 0, BLOCK_TOKENS, 0)
        assert salted_keys != generate_block_hash_extra_keys(of_adapter, 0, BLOCK_TOKENS, 0)[0]


def test_until_the_digest_is_known_nothing_is_loaded_or_stored(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    engine.report(engine.compute("writer", adapter(folder)))
    fresh = EngineProcess(engine.half)
    fresh.core.add_lora(adapter(folder))
    assert fresh.compute("r", adapter(folder)) == []  # neither loaded, though it is there, nor stored
    assert keys_of(fresh, "r") == []
    fresh.digests.run()
    assert fresh.step({"r": 0}) == []  # all of its blocks are there already
    assert len(keys_of(fresh, "r")) == BLOCKS
    assert fresh.matched("next", adapter(folder)) == TOKENS


def test_what_was_computed_before_the_digest_was_known_is_stored_then(engine: EngineProcess, folder: Path):
    engine.core.add_lora(adapter(folder))
    assert engine.compute("r", adapter(folder)) == []
    engine.digests.run()
    engine.report(engine.step({"r": 0}))
    assert engine.matched("reader", adapter(folder)) == TOKENS


def test_an_adapter_that_a_step_loads_waits_for_the_workers_word(engine: EngineProcess, folder: Path):
    assert engine.compute("r", adapter(folder)) == []
    engine.digests.run()
    assert engine.step({"r": 0}) == []
    engine.report([], loaded={1: {adapter_state(adapter(folder))}})
    engine.report(engine.step({"r": 0}))
    assert engine.matched("reader", adapter(folder)) == TOKENS


@pytest.mark.parametrize("disagree", [False, True])
def test_files_that_changed_before_the_workers_loaded_them(engine: EngineProcess, folder: Path, disagree: bool):
    old = adapter_state(adapter(folder))
    assert engine.compute("r", adapter(folder)) == []
    engine.digests.run()
    write_adapter(folder, b"trained on")
    loaded = {adapter_state(adapter(folder))} | ({old} if disagree else set())
    engine.report([], loaded={1: loaded})
    engine.digests.run()
    assert engine.step({"r": 0}) == []
    engine.report(engine.compute("next", adapter(folder)))
    assert engine.matched("reader", adapter(folder)) == (0 if disagree else TOKENS)


def test_a_store_under_way_while_other_weights_are_loaded_is_dropped(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    jobs = engine.compute("writer", adapter(folder))
    write_adapter(folder, b"trained on")
    engine.load(adapter(folder, load_inplace=True))
    engine.report(jobs)
    write_adapter(folder, b"ours")  # a later load of the first weights must not hit it
    engine.load(adapter(folder, load_inplace=True))
    assert engine.matched("reader", adapter(folder)) == 0


def test_a_worker_that_loads_other_files_after_an_eviction(engine: EngineProcess, folder: Path):
    """vLLM evicts the adapter used least and loads it again with the next request: the files may be others by then."""
    engine.load(adapter(folder))
    jobs = engine.compute("writer", adapter(folder))
    write_adapter(folder, b"trained on")
    engine.report(jobs, loaded={1: {adapter_state(adapter(folder))}})
    engine.digests.run()
    assert engine.step({"writer": 0}) == []
    assert engine.matched("reader", adapter(folder)) == 0
    assert keys_of(engine, "reader") != keys_of(engine, "writer")


def test_a_request_that_waited_while_other_weights_came_is_left_alone(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    waiting = engine.request("waiting", adapter(folder))
    engine.half.on_new_request(waiting)
    engine.report(engine.compute("writer", adapter(folder)))
    write_adapter(folder, b"trained on")
    engine.load(adapter(folder, load_inplace=True))
    assert engine.half.get_num_new_matched_tokens(waiting, 0) == (0, False)
    assert engine.step({"waiting": TOKENS}, new={"waiting": [5, 6, 7, 8]}) == []


def test_a_failed_reload_keeps_what_there_was(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    engine.report(engine.compute("writer", adapter(folder)))

    def fail(request: LoRARequest) -> bool:
        raise ValueError("unexpected modules")

    engine.core.model_executor = part_of(UniProcExecutor, add_lora=fail)
    with pytest.raises(ValueError, match="unexpected modules"):
        engine.core.add_lora(adapter(folder, load_inplace=True))
    assert engine.matched("reader", adapter(folder)) == TOKENS


@pytest.mark.parametrize(
    "request_of",
    [
        *(
            [lambda folder: adapter(folder, tensorizer_config_dict={"tensorizer_uri": "s3://x"})]
            if "tensorizer_config_dict" in LoRARequest.__struct_fields__
            else []
        ),
        lambda folder: LoRARequest("support", 1, str(folder / "not there")),
        lambda folder: LoRARequest("support", 1, "unknown/adapter"),
    ],
)
def test_an_adapter_whose_files_cannot_be_seen_is_not_offloaded(engine: EngineProcess, folder: Path, request_of):
    request = request_of(folder)
    engine.load(request)
    assert engine.compute("r", request) == []
    assert engine.matched("reader", request) == 0


def test_a_prompt_shorter_than_a_block_has_its_adapter(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    instance = adapter_of(engine.request("short", adapter(folder), tokens=3))
    assert instance is not None
    assert instance.key is not None


def test_events_carry_the_hashes_that_the_device_s_events_carry(engine: EngineProcess, folder: Path):
    engine.load(adapter(folder))
    engine.report(engine.compute("writer", adapter(folder)))
    stored = [event for event in engine.half.take_events() if isinstance(event, BlockStored)]
    assert {one for event in stored for one in event.block_hashes} == {
        one if generation() is Generation.V023 else kv_cache_utils.maybe_convert_block_hash(one)
        for one in engine.half._req_status["writer"].req.block_hashes
    }


def test_vllm_still_finds_what_an_rpc_s_argument_is():
    """vLLM converts messages by the annotations of the method that it calls."""
    patch_vllm("adapter-loads", "adapter-of-request", "adapter-version-in-hash")
    parameters = inspect.signature(EngineCore.add_lora).parameters
    assert list(parameters) == ["self", "lora_request"]
    assert parameters["lora_request"].annotation is LoRARequest


def test_ranks_are_heard_together():
    one = SpillwayWorkerMetadata(adapters={1: frozenset({b"a"}), 2: frozenset({b"b"})})
    other = SpillwayWorkerMetadata(adapters={1: frozenset({b"c"}), 2: frozenset({b"b"})})
    together = one.aggregate(other)
    assert isinstance(together, SpillwayWorkerMetadata)
    assert together.adapters == {1: {b"a", b"c"}, 2: {b"b"}}


def test_a_worker_reports_what_it_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda self, lora_request: "loaded")
    patch_vllm("adapter-loads-of-workers")
    config, other_engine = LoRAConfig(), LoRAConfig()
    loads, others = AdapterLoads(config), AdapterLoads(other_engine)
    manager = WorkerLoRAManager.__new__(WorkerLoRAManager)
    manager.lora_config = config
    assert manager._load_adapter(adapter(folder)) == "loaded"
    state = adapter_state(adapter(folder))
    assert loads.take() == {1: {state}}
    manager._load_adapter(adapter(folder))
    assert loads.take() == {}  # the same files
    write_adapter(folder, b"trained on")
    manager._load_adapter(adapter(folder))
    assert loads.take() == {1: {adapter_state(adapter(folder))}} != {1: {state}}
    assert others.take() == {}


def test_a_worker_reports_files_that_change_while_it_loads(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", lambda self, lora_request: write_adapter(folder, b"half"))
    patch_vllm("adapter-loads-of-workers")
    config = LoRAConfig()
    loads = AdapterLoads(config)
    manager = WorkerLoRAManager.__new__(WorkerLoRAManager)
    manager.lora_config = config
    manager._load_adapter(adapter(folder))
    assert loads.take() == {1: {None}}


def test_files_that_change_while_they_are_digested_have_no_identity(folder: Path):
    executor = StepExecutor()

    def digest_and_change(place: Path) -> bytes:
        write_adapter(place, b"trained on")
        return b"x" * 32

    registry = AdapterRegistry(digest=digest_and_change, executor=executor)
    with registry.loading(adapter(folder)):
        pass
    executor.run()
    assert registry.of(adapter(folder)).key is None
