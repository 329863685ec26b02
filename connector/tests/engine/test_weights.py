"""A change of weights is noticed where vLLM's engine core sends it to the workers, before they see it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker

from spillway_connector.engine.weights import HARMLESS, install_weight_change_hook, may_change_weights


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
    install_weight_change_hook()
    core = EngineCore.__new__(EngineCore)
    core.scheduler = SimpleNamespace(connector=Listener(order))
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda method, timeout, args, kwargs: order.append(f"ran {getattr(method, '__name__', method)}")
    )
    return core


@pytest.mark.parametrize("method", ["reload_weights", "start_weight_update", "update_weights", "finish_weight_update"])
def test_vllm_s_rpcs_that_change_weights_are_reported_before_they_run(core: EngineCore, order: list[str], method: str):
    assert callable(getattr(Worker, method)), "vLLM's worker has no such RPC any more"
    core.collective_rpc(method, kwargs={"weights_path": "/elsewhere"})
    assert order == [f"notified of {method}", f"ran {method}"]


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
    install_weight_change_hook()
    core.collective_rpc("update_weights")
    assert order == ["notified of update_weights", "ran update_weights"]
    parameters = list(inspect.signature(EngineCore.collective_rpc).parameters)
    assert parameters == ["self", "method", "timeout", "args", "kwargs"]


def test_an_unknown_rpc_counts_as_a_change():
    assert may_change_weights("something_new")
