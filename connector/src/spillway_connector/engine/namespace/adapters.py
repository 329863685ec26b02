"""The identity of a LoRA adapter's weights, as part of the keys of the requests computed with them.

vLLM's block hash contains only an adapter's name. Under one name two engines may have different weights, and one engine
may have different weights one after the other. So a key of such a request also contains a digest of the adapter's
files, and none of its KV is loaded or stored until the digest is known.

An :class:`AdapterInstance` is one set of weights under one id. It is established from the files' sizes and
times before and after a load: by the scheduler's process around the RPC that loads (`add_lora`), and by the workers
around every load, of which some happen within a step (first use, or once more after an eviction). The digest is
computed on another thread and is used only if the files are still those that were loaded.

vLLM's prefix cache on the device would serve KV of the former weights, since the hash is the same (0.23). So the hash
of a name whose weights were replaced gets a version number here. The number counts what this engine has loaded, so it
is no part of a key: keys are made of the hashes of an engine that loaded these weights first (:class:`FirstLoad`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from blake3 import blake3
from vllm.config import LoRAConfig, VllmConfig
from vllm.lora.request import LoRARequest

from spillway_connector.engine.patches.own_connector import own_connector
from spillway_connector.identity.content_digests import FileState
from spillway_connector.identity.model import adapter_digest, adapter_files

logger = logging.getLogger(__name__)

KEY_BYTES = 16  # of an adapter's identity in a key
_TAG = "spillway_adapter"  # attribute of a vLLM request


class AdapterInstance:
    """One set of weights under one id. Read by the scheduler's thread, completed by others."""

    __slots__ = ("current", "digest", "files", "loaded", "lora_int_id", "name", "number")

    def __init__(self, name: str, lora_int_id: int, files: bytes | None, number: int, loaded: bool) -> None:
        self.name = name
        self.lora_int_id = lora_int_id
        self.files = files  # their state when they were loaded; None: unknown
        self.number = number  # how often the name's weights were replaced before
        self.loaded = loaded  # by the workers, for certain
        self.current = True  # nothing else has been loaded under this id since
        self.digest: bytes | None = None

    @property
    def key(self) -> bytes | None:
        """The part of a key; None: nothing may be loaded or stored now."""
        return self.digest if self.current and self.loaded else None


def adapter_state(request: LoRARequest) -> bytes | None:
    """16 bytes that change when the adapter's files do; None if they cannot be read."""
    folder = _local_folder(request)
    if folder is None:
        return None
    try:
        files = [(path.name, FileState.of(path)) for path in adapter_files(folder)]
    except OSError:
        return None
    return blake3(repr((str(folder), files)).encode()).digest(16) if files else None


def _local_folder(request: LoRARequest) -> Path | None:
    """Return the folder that vLLM reads (lora/utils.py: get_adapter_absolute_path), without asking a hub."""
    if getattr(request, "tensorizer_config_dict", None):  # gone in vLLM 0.32
        return None
    path = Path(request.lora_path).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.is_absolute():
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(request.lora_path, local_files_only=True))
    except (OSError, ValueError):  # not there, or not a name that a hub could have
        return None


class AdapterRegistry:
    """The adapters of one engine; called by the thread that takes requests in and by the scheduler's."""

    def __init__(
        self,
        digest: Callable[[Path], bytes] = adapter_digest,
        state: Callable[[LoRARequest], bytes | None] = adapter_state,
        executor: Executor | None = None,
    ) -> None:
        self._digest_of = digest
        self._state_of = state
        self._executor = executor
        self._lock = threading.Lock()
        self._current: dict[int, AdapterInstance] = {}
        self._requests: dict[int, LoRARequest] = {}
        self._last_of_name: dict[str, AdapterInstance] = {}
        self._reported: dict[int, bytes | None] = {}  # what the workers loaded last

    def of(self, request: LoRARequest) -> AdapterInstance:
        """The instance with which a request that arrives now is computed."""
        known = self._current.get(request.lora_int_id)
        if known is not None and not request.load_inplace:
            return known
        state = self._state_of(request)
        with self._lock:
            known = self._current.get(request.lora_int_id)
            if known is not None and (not request.load_inplace or known.files == state):
                return known
            loaded = state is not None and self._reported.get(request.lora_int_id) == state
            return self._begin(request, state, loaded)

    @contextmanager
    def loading(self, request: LoRARequest) -> Iterator[None]:
        """Surround the RPC by which all workers load an adapter. If it fails, they keep what they have."""
        before = self._state_of(request)
        yield
        after = self._state_of(request)
        state = after if before in (after, None) else None  # of a hub: there is nothing before it is fetched
        with self._lock:
            known = self._current.get(request.lora_int_id)
            if known is not None and known.files == state:
                known.loaded = True
            elif known is None or request.load_inplace:
                self._begin(request, state, loaded=True)
            else:  # the workers keep their weights unless these were evicted, which they report
                self._begin(request, None, loaded=False)

    def loaded_by_workers(self, loads: Mapping[int, AbstractSet[bytes | None]]) -> None:
        """The ranks have loaded these adapters within a step, by id; an adapter has several states if ranks
        disagree."""
        with self._lock:
            for lora_int_id, states in loads.items():
                state = next(iter(states)) if len(states) == 1 else None
                self._reported[lora_int_id] = state
                known = self._current.get(lora_int_id)
                if known is None:
                    continue
                if state is not None and known.files == state:
                    known.loaded = True
                else:
                    logger.warning(
                        "LoRA adapter %s: its files changed before a worker loaded them; KV computed with it from now "
                        "on is that of another adapter",
                        known.name,
                    )
                    self._begin(self._requests[lora_int_id], state, loaded=state is not None)

    def _begin(self, request: LoRARequest, state: bytes | None, loaded: bool) -> AdapterInstance:
        before = self._current.get(request.lora_int_id)
        if before is not None:
            before.current = False
        last = self._last_of_name.get(request.lora_name)
        same = last is not None and state is not None and last.files == state
        number = 0 if last is None else last.number + (not same)
        instance = AdapterInstance(request.lora_name, request.lora_int_id, state, number, loaded)
        self._current[request.lora_int_id] = self._last_of_name[request.lora_name] = instance
        self._requests[request.lora_int_id] = request
        if state is None:
            logger.warning(
                "LoRA adapter %s (%s): its files cannot be identified, so its KV is not offloaded; give a "
                "folder that does not change while it is loaded",
                request.lora_name,
                request.lora_path,
            )
        else:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "spillway-adapters")
            self._executor.submit(self._identify, request, instance)
        return instance

    def _identify(self, request: LoRARequest, instance: AdapterInstance) -> None:
        folder = _local_folder(request)
        try:
            digest = self._digest_of(folder) if folder is not None else None
        except OSError as error:
            logger.warning("LoRA adapter %s: its KV is not offloaded: %s", instance.name, error)
            return
        if digest is None or self._state_of(request) != instance.files:
            logger.warning("LoRA adapter %s: its KV is not offloaded: its files have changed", instance.name)
            return
        kind = b"3d" if request.is_3d_lora_weight else b"2d"
        identity = blake3(digest + kind).digest(KEY_BYTES)
        logger.info("LoRA adapter %s: identity %s", instance.name, identity.hex())
        instance.digest = identity

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class FirstLoad:
    """A vLLM request with the block hashes that it has if its adapter's weights were the first under their name."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.block_hashes: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def update_block_hashes(self) -> None:
        self.block_hashes += self._request._block_hasher(self)


def lora_mixes_weights(vllm_config: VllmConfig) -> bool:
    """Whether a batch with requests of an adapter and of the base model may compute all of them with the adapter.

    vLLM gives tokens without an adapter the index -1, which its CPU kernels read as the last adapter's.
    """
    return vllm_config.lora_config is not None and vllm_config.device_config.device_type == "cpu"


def adapter_of(request: Any) -> AdapterInstance | None:
    """The adapter of a vLLM request; None: it has no adapter, or its engine has no `adapter-of-request` patch."""
    instance = getattr(request, _TAG, None)
    return instance if isinstance(instance, AdapterInstance) else None


# --- in the engine's process -----------------------------------------------------------------------------------------


@runtime_checkable
class AdapterListener(Protocol):
    """A connector that is called around each load of an adapter."""

    adapters: AdapterRegistry

    def adapter_loading(self, request: LoRARequest) -> AbstractContextManager[None]:
        """Surround the load of an adapter by the workers, on the scheduler's thread, between steps."""
        ...


_requests_of = threading.local()  # .adapters: of the engine that makes a request in this thread


def reporting_add_lora(add_lora: Any) -> Callable[..., bool]:
    """Wrap EngineCore.add_lora so that it tells the engine's connector of each adapter that an RPC loads."""

    def reporting(self: Any, lora_request: LoRARequest) -> bool:
        connector = own_connector(getattr(self, "scheduler", None), AdapterListener)  # type: ignore[type-abstract]
        if connector is None:
            return bool(add_lora(self, lora_request))
        with connector.adapter_loading(lora_request):
            return bool(add_lora(self, lora_request))

    return reporting


def tagging_preprocess(preprocess: Any) -> Callable[..., Any]:
    """Wrap EngineCore.preprocess_add_request so that each request gets the instance of its adapter."""

    def tagging(self: Any, request: Any) -> Any:
        connector = own_connector(getattr(self, "scheduler", None), AdapterListener)  # type: ignore[type-abstract]
        adapters = connector.adapters if connector is not None else None
        _requests_of.adapters = adapters
        try:
            made, wave = preprocess(self, request)
        finally:
            _requests_of.adapters = None
        if adapters is not None and made.lora_request and adapter_of(made) is None:  # too short to have been hashed
            setattr(made, _TAG, adapters.of(made.lora_request))
        return made, wave

    return tagging


def numbered_extra_keys(extra_keys: Any) -> Callable[[Any], list[Any]]:
    """Wrap kv_cache_utils._gen_lora_extra_hash_keys: add how often an adapter's weights were replaced.

    vLLM before 0.32 hashes an adapter's bare name, which a request of the base model may have as its cache_salt. Then
    its first block would be the adapter's, so the name is tagged as 0.32 does it.
    """

    def numbered(request: Any) -> list[Any]:
        keys: list[Any] = [("lora", key) if isinstance(key, str) else key for key in extra_keys(request)]
        if keys and not isinstance(request, FirstLoad):
            instance = adapter_of(request)
            if instance is None and (adapters := getattr(_requests_of, "adapters", None)) is not None:
                instance = adapters.of(request.lora_request)
                setattr(request, _TAG, instance)
            if instance is not None and instance.number:
                keys = [*keys, ("lora", f"weights {instance.number}")]
        return keys

    return numbered


# --- in a worker's process -------------------------------------------------------------------------------------------


class AdapterLoads:
    """The adapters that a rank's LoRA manager has loaded since the last report."""

    _of_engine: dict[int, tuple[LoRAConfig, AdapterLoads]] = {}  # noqa: RUF012 - by the engine's own configuration object

    def __init__(self, lora_config: LoRAConfig | None) -> None:
        self._loads: dict[int, bytes | None] = {}
        self._known: dict[int, bytes | None] = {}
        if lora_config is not None:
            self._of_engine[id(lora_config)] = lora_config, self

    def note(self, lora_int_id: int, state: bytes | None) -> None:
        if state is None or self._known.get(lora_int_id) != state:
            self._known[lora_int_id] = self._loads[lora_int_id] = state

    def take(self) -> dict[int, frozenset[bytes | None]]:
        loads, self._loads = self._loads, {}
        return {lora_int_id: frozenset((state,)) for lora_int_id, state in loads.items()}


def watched_load(load_adapter: Any) -> Callable[..., Any]:
    """Wrap WorkerLoRAManager._load_adapter so that it notes each load for the rank's next report."""

    def watched(self: Any, lora_request: LoRARequest) -> Any:
        _, loads = AdapterLoads._of_engine.get(id(self.lora_config), (None, None))
        if loads is None:
            return load_adapter(self, lora_request)
        before = adapter_state(lora_request)
        adapter = load_adapter(self, lora_request)
        after = adapter_state(lora_request)
        loads.note(lora_request.lora_int_id, after if before in (after, None) else None)
        return adapter

    return watched
