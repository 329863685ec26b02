"""A change of weights is noticed where vLLM's engine core sends it to the workers, before they see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.gpu_worker import Worker

from spillway_connector.engine.namespace.weights import HARMLESS, WeightsNamed, may_change_weights
from spillway_connector.errors import ConfigError
from spillway_connector.testing.generation import patch_vllm
from spillway_connector.testing.vllm_parts import part_of
from spillway_settings.wire import WEIGHTS_UTILITY

# RPCs of vLLM's workers that change weights, may do anything, or no caller sends to a running engine.
CHANGING = {
    "apply_model",
    "compile_or_warm_up_model",
    "determine_available_memory",
    "discard",
    "elastic_ep_execute",
    "execute_model",
    "finish_weight_update",
    "get_draft_model",  # the caller may change what it is given
    "get_model",
    "handle_ft_command",
    "init_device",
    "init_worker",
    "initialize_from_config",
    "load_model",
    "load_weights_direct",
    "randomize_dummy_inputs",
    "reload_weights",
    "reset_weights",
    "sample_tokens",
    "set_kv_cache_layout",
    "shutdown",
    "sleep",
    "sleep_mode_backend",
    "start_draft_weight_update",
    "start_weight_update",
    "take_draft_token_ids",
    "update_config",
    "update_environment_variables",
    "update_weights",
    "vocab_size",
    "wait_for_comm",
    "wake_up",
}


class Listener:
    def __init__(self, order: list[str]) -> None:
        self.order = order

    def weights_changing(self, cause: str) -> None:
        self.order.append(f"notified of {cause}")


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.fixture
def core(order: list[str]) -> EngineCore:
    """vLLM's own class; what it would start (model, workers) is not there."""
    patch_vllm("weight-changes", "sleeps")
    executor = part_of(
        UniProcExecutor,
        collective_rpc=lambda method, timeout, args, kwargs: order.append(f"ran {getattr(method, '__name__', method)}"),
        sleep=lambda level: order.append(f"slept at level {level}"),
    )
    scheduler = part_of(Scheduler, connector=Listener(order))
    return part_of(
        EngineCore, scheduler=scheduler, model_executor=executor, pause_scheduler=lambda mode, clear_cache: None
    )


@pytest.mark.parametrize("method", ["reload_weights", "start_weight_update", "update_weights", "finish_weight_update"])
def test_vllm_s_rpcs_that_change_weights_are_reported_before_they_run(core: EngineCore, order: list[str], method: str):
    assert callable(getattr(Worker, method)), "vLLM's worker has no such RPC any more"
    core.collective_rpc(method, kwargs={"weights_path": "/elsewhere"})
    assert order == [f"notified of {method}", f"ran {method}"]


def test_every_rpc_of_vllm_s_workers_has_been_looked_at():
    """RPCs that only read must not close the shared tier: vLLM 0.32 sends one after each request to a scoring route."""
    known = {name for name, _ in inspect.getmembers(Worker, callable) if not name.startswith("_")}

    assert known - HARMLESS - CHANGING == set()
    assert not CHANGING & HARMLESS


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_sleep_that_drops_the_weights_is_a_change(core: EngineCore, order: list[str], level: int):
    core.sleep(level)

    notified = ["notified of sleep of level 2"] if level == 2 else []
    assert order == notified + ([f"slept at level {level}"] if level else [])


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("level", "resets_connector"), [(1, False), (2, True)])
def test_a_sleep_keeps_what_the_weights_that_come_back_have_computed(
    core: EngineCore, level: int, resets_connector: bool, at_once: bool
):
    resets: list[tuple[bool, bool]] = []
    core.reset_prefix_cache = lambda **caches: resets.append(tuple(caches.values())) or True
    core.reset_mm_cache = core.reset_encoder_cache = lambda: None
    later: list[Future[None]] = []

    def pause(mode: str, clear_cache: bool) -> Future[None] | None:
        if at_once:
            core._reset_caches()
            return None
        later.append(Future())
        return later[-1]

    core.pause_scheduler = pause
    core.sleep(level)
    core.sleep(level)  # once more before the first one is over
    for future in later:
        core._reset_caches()
        future.set_result(None)
    core._reset_caches()  # of a pause

    assert resets[0] == (True, resets_connector)
    assert resets[-1] == (True, True), "the reset of a pause, which may precede other weights, is of the connector too"


def test_a_sleep_that_is_refused_leaves_the_next_reset_whole(core: EngineCore):
    resets: list[tuple[bool, bool]] = []
    core.reset_prefix_cache = lambda **caches: resets.append(tuple(caches.values())) or True
    core.reset_mm_cache = core.reset_encoder_cache = lambda: None

    def refuse(mode: str, clear_cache: bool) -> None:
        raise ValueError(f"Invalid pause mode: {mode}")

    core.pause_scheduler = refuse
    with pytest.raises(ValueError, match="pause mode"):
        core.sleep(1, mode="soon")
    core._reset_caches()
    assert resets == [(True, True)]


def test_a_second_sleep_that_is_refused_leaves_the_first_one_s_reset_as_it_was(core: EngineCore):
    resets: list[tuple[bool, bool]] = []
    core.reset_prefix_cache = lambda **caches: resets.append(tuple(caches.values())) or True
    core.reset_mm_cache = core.reset_encoder_cache = lambda: None
    core.pause_scheduler = lambda mode, clear_cache: Future()
    core.sleep(1)

    def refuse(mode: str, clear_cache: bool) -> None:
        raise ValueError(f"Invalid pause mode: {mode}")

    core.pause_scheduler = refuse
    with pytest.raises(ValueError, match="pause mode"):
        core.sleep(1, mode="soon")
    core._reset_caches()  # the first sleep's copies have ended
    assert resets == [(True, False)]


@pytest.mark.skipif(not hasattr(EngineCore, "release_kv_cache_memory"), reason="this vLLM keeps the device's KV")
def test_a_release_of_the_device_s_kv_keeps_what_the_weights_that_stay_have_computed(
    core: EngineCore, order: list[str]
):
    resets: list[tuple[bool, bool]] = []
    core.reset_prefix_cache = lambda **caches: resets.append(tuple(caches.values())) or True
    core.reset_mm_cache = core.reset_encoder_cache = lambda: None
    core.scheduler.has_requests = lambda: False
    core.model_executor.discard = lambda tags: order.append(f"discarded {tags}")
    core.model_executor.sleeping_tags, core.batch_queue = set(), None
    patch_vllm("kv-memory-releases")

    core.scheduler._pause_state = PauseState.UNPAUSED
    with pytest.raises(RuntimeError, match="requires a completed pause"):
        core.release_kv_cache_memory()
    core._reset_caches()  # that of the pause to come
    core.scheduler._pause_state = PauseState.PAUSED_ALL
    core.release_kv_cache_memory()
    core._reset_caches()  # of a later pause

    assert resets == [(True, True), (True, False), (True, True)]
    assert order == ["discarded ('kv_cache',)"], "weights that stay are no others"


def test_a_function_of_the_caller_s_may_do_anything(core: EngineCore, order: list[str]):
    def patch_weights(worker):
        raise AssertionError("the executor of this test runs nothing")

    core.collective_rpc(patch_weights)
    assert order == ["notified of patch_weights", "ran patch_weights"]


@pytest.mark.parametrize("method", sorted(HARMLESS))
def test_harmless_rpcs_pass_in_silence(core: EngineCore, order: list[str], method: str):
    core.collective_rpc(method)
    assert order == [f"ran {method}"]


def test_other_connectors_are_left_alone(core: EngineCore, order: list[str]):
    core.scheduler.connector = object()
    core.collective_rpc("reload_weights")
    core.scheduler.connector = None
    core.collective_rpc("reload_weights")
    assert order == ["ran reload_weights"] * 2


def test_listening_twice_tells_once(core: EngineCore, order: list[str]):
    patch_vllm("weight-changes", "sleeps")
    core.collective_rpc("update_weights")
    assert order == ["notified of update_weights", "ran update_weights"]
    parameters = list(inspect.signature(EngineCore.collective_rpc).parameters)
    assert parameters == ["self", "method", "timeout", "args", "kwargs"]


def test_an_unknown_rpc_counts_as_a_change():
    assert may_change_weights("something_new")


class Naming:
    """A connector that takes a name as it is chosen to."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.refusal: str | Exception | None = None

    def weights_named(self) -> WeightsNamed:
        return WeightsNamed(self.version, True, "ab")

    def name_weights(self, version: str | None, reset_device: Callable[[], bool]) -> str | None:
        if isinstance(self.refusal, Exception):
            raise self.refusal
        if self.refusal is None and reset_device():
            self.version = version
        return self.refusal


def test_a_name_is_taken_with_a_reset_of_all_that_the_device_computed_before(core: EngineCore, order: list[str]):
    patch_vllm("weight-names")
    core.scheduler.connector = connector = Naming()
    core.reset_prefix_cache = lambda: order.append("reset of the prefix cache") or True
    core.reset_encoder_cache = lambda: order.append("reset of the encoder cache")
    utility = getattr(core, WEIGHTS_UTILITY)

    assert utility() == {"version": None, "known": True, "namespace": "ab", "refused": None}
    assert utility("step-7") == {"version": "step-7", "known": True, "namespace": "ab", "refused": None}
    assert order == ["reset of the prefix cache", "reset of the encoder cache"]
    connector.refusal = "blocks are in use"
    assert utility("step-8")["refused"] == "blocks are in use"
    connector.refusal = ConfigError("the folder is gone")
    assert utility("step-8")["refused"] == "the folder is gone"
    assert connector.version == "step-7"
    core.scheduler.connector = None
    assert utility("step-8") == {}
