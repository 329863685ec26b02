"""Detects that the model's weights are about to change in place.

A namespace names the weights that the engine was started with. vLLM 0.23 can change them afterwards: `reload_weights`,
`start_weight_update` / `update_weights` (trainers), or any function that a caller sends to the workers. All of these
reach the engine as `EngineCore.collective_rpc`, on the scheduler's thread and between two steps, so that method is
patched: RPCs known not to touch weights pass, any other is treated as a change before it runs. So is a sleep of level
2, which drops the weights: what computes after it, before they are loaded again, is no KV of theirs. A sleep of level 1
brings them back, and a release of the device's KV leaves them in memory, so the reset of caches that belongs to
either leaves the CPU tier as it is.

Whoever changed the weights may name them: `EngineCore.spillway_weights(version)`, which the engine service calls. The
tiers are then used again, in the namespace of this name, which engines that were given the same name share. A name
that was given before finds what was stored under it.

Not detected: code that changes parameters from inside a worker process without an RPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from spillway_connector.engine.patches.own_connector import own_connector
from spillway_connector.engine.patches.patching import replace_on
from spillway_connector.errors import SpillwayError

# RPCs of vLLM itself that do not change the weights. LoRA adapters are part of a block's key (adapters.py).
HARMLESS = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",  # of the process as a whole
        "checkpoint_restore",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_simple_cpu_offload_num_cpu_blocks",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",  # after each request to score that compares token by token
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    }
)

_LEVEL_WITHOUT_WEIGHTS = 2


@runtime_checkable
class WeightsListener(Protocol):
    """A connector that is called before a change of weights."""

    def weights_changing(self, cause: str) -> None:
        """Prepare for a change of the weights, on the scheduler's thread, between steps. `cause`: the RPC's name."""
        ...


@dataclass(frozen=True, slots=True)
class WeightsNamed:
    """The weights under whose name an engine shares KV.

    Args:
        version: Their name; None for the weights of the start, if these have no name.
        known: False from a change of the weights until they are named.
        namespace: The namespace of the shared chunks in hexadecimal digits; empty without a shared tier.
    """

    version: str | None
    known: bool
    namespace: str


@runtime_checkable
class WeightsNaming(Protocol):
    """A connector that is given names of the weights. Called on the scheduler's thread, between steps."""

    def weights_named(self) -> WeightsNamed: ...

    def name_weights(self, version: str | None, reset_device: Callable[[], bool]) -> str | None:
        """The engine has the weights of this version; None: those that it was started with. Returns why the name cannot
        be taken now, in a sentence. Raises SpillwayError."""
        ...


def weights_utility(_: None) -> Callable[..., dict[str, Any]]:
    """Make the function that is added to EngineCore, which has no such utility."""
    return _weights


def _weights(core: Any, *version: str | None) -> dict[str, Any]:
    """version: the version to take; without an argument, the present one is asked for. Returns WeightsNamed's fields,
    and `refused`: why the name was not taken; nothing without Spillway's connector."""
    connector = own_connector(core.scheduler, WeightsNaming)  # type: ignore[type-abstract]
    if connector is None:
        return {}

    def reset_device() -> bool:
        done = bool(core.reset_prefix_cache())
        if done:
            core.reset_encoder_cache()  # what is computed from an image of before is of the former weights
        return done

    refused = None
    if version:
        try:
            refused = connector.name_weights(version[0], reset_device)
        except SpillwayError as error:
            refused = str(error)
    return {**asdict(connector.weights_named()), "refused": refused}


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Whether an RPC to the workers must be taken for a change of weights: all but those known to be harmless."""
    return not isinstance(method, str) or method not in HARMLESS


def watched_sleep(sleep: Any) -> Callable[..., Any]:
    """Wrap EngineCore.sleep: it reports a sleep that drops the weights, and in any other the CPU tier stays."""

    def watched(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= _LEVEL_WITHOUT_WEIGHTS:
            _report(self, f"sleep of level {level}")
        with _connector_kept(self) if 0 < level < _LEVEL_WITHOUT_WEIGHTS else nullcontext():
            return sleep(self, level, *args, **kwargs)

    return watched


def watched_release(release: Any) -> Callable[..., Any]:
    """Wrap EngineCore.release_kv_cache_memory: the device loses its KV, the weights stay, and so does the CPU tier."""

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _connector_kept(self):
            return release(self, *args, **kwargs)

    return watched


@contextmanager
def _connector_kept(engine_core: Any) -> Iterator[None]:
    """Let the next reset of all caches leave the connector's out, unless what is called here fails.

    It is the one that ends the pause of a sleep, at once or when copies have ended, or the one of a release: the device
    loses its KV, but the weights stay or come back, so what the tiers hold stays right.
    """
    if "_reset_caches" in vars(engine_core) or own_connector(engine_core.scheduler, WeightsListener) is None:  # type: ignore[type-abstract]
        yield
        return
    reset_caches = engine_core._reset_caches

    def reset_once(reset_running_requests: bool = True, reset_connector: bool = True) -> None:
        delattr(engine_core, "_reset_caches")
        reset_caches(reset_running_requests, reset_connector=False)

    replace_on(engine_core, "_reset_caches", reset_once)
    try:
        yield
    except Exception:
        vars(engine_core).pop("_reset_caches", None)  # what is refused resets nothing
        raise


def watched_collective_rpc(collective_rpc: Any) -> Callable[..., Any]:
    """Wrap EngineCore.collective_rpc so that it reports an RPC that may change the weights."""

    def watched(self: Any, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if may_change_weights(method):
            _report(self, method if isinstance(method, str) else getattr(method, "__name__", "a function"))
        return collective_rpc(self, method, *args, **kwargs)

    return watched


def _report(engine_core: Any, cause: str) -> None:
    connector = own_connector(getattr(engine_core, "scheduler", None), WeightsListener)  # type: ignore[type-abstract]
    if connector is not None:
        connector.weights_changing(cause)
