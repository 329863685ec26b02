"""Settings -> the command line and environment of vLLM's API server. Pure: equal inputs give equal lists."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from typing import Any

from spillway_connector.config import ConnectorConfig
from spillway_connector.transfer_config import transfer_config
from spillway_engine.chart_keys import settings_tree
from spillway_engine.extra_arguments import is_secret
from spillway_engine.kv_transfer import alone, combined
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import MemoryBudget
from spillway_engine.settings import EngineSettings
from spillway_engine.tier_settings import secondary_tiers
from spillway_settings.values.engine import RENDEZVOUS_PORT

MIDDLEWARE = "spillway_engine.middleware.ReadinessMiddleware"
SMALL_MACHINE_CORES = 4
SERVER_MODULE = "vllm.entrypoints.openai.api_server"  # the `vllm` command needs metadata that the CPU wheel lacks
WORKER_MODULE = "spillway_engine.headless"  # of the further pods of a replica


def server_arguments(settings: EngineSettings, machine: Machine, budget: MemoryBudget) -> list[str]:
    """Arguments after `python -m vllm.entrypoints.openai.api_server`; the user's extraArgs come last and so win."""
    arguments = [
        *("--model", settings.model.path),
        *("--served-model-name", settings.served_name),
        *("--host", settings.host),
        *("--port", str(settings.port)),
        *("--dtype", budget.dtype),
        *("--max-model-len", str(settings.model.max_length)),
        *("--seed", str(settings.model.seed)),
        *("--block-size", str(settings.block_size)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        # Block hashes must be equal on every engine that shares a tier, whatever process made them.
        *("--prefix-caching-hash-algo", "sha256_cbor"),
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        *("--middleware", MIDDLEWARE),
    ]
    if settings.pipeline_parallel_size > 1:
        arguments += ["--pipeline-parallel-size", str(settings.pipeline_parallel_size)]
    if settings.data_parallel_size > 1:
        arguments += ["--data-parallel-size", str(settings.data_parallel_size)]
    arguments += node_arguments(settings)
    if settings.model.kv_cache_dtype != "auto":
        arguments += ["--kv-cache-dtype", settings.model.kv_cache_dtype]
    if settings.model.quantization is not None:
        arguments += ["--quantization", settings.model.quantization]
    if settings.allowed_media_domains:
        arguments += ["--allowed-media-domains", *settings.allowed_media_domains]
    arguments += lora_arguments(settings)
    if budget.device_blocks is not None:
        arguments += ["--num-gpu-blocks-override", str(budget.device_blocks)]
    if machine.platform == "cpu":
        # Compiled graphs take two minutes to start and are no faster on two cores.
        arguments += ["--enforce-eager"]
        if budget.device_bytes is not None:
            # Otherwise vLLM demands that 92 % of the machine's memory is free, which a second engine never finds.
            arguments += ["--kv-cache-memory-bytes", str(budget.device_bytes // settings.cores_here)]
    if machine.platform == "npu" and settings.cpu_binding is not None:
        arguments += ["--additional-config", _compact({"enable_cpu_binding": settings.cpu_binding == "on"})]
    if settings.kv_events.enabled:
        arguments += ["--kv-events-config", _compact(kv_events_config(settings))]
    transfer = kv_transfer_config(settings)
    if transfer is not None:
        if machine.platform == "npu" and settings.kv_transfer is None:
            # vllm-ascend refuses "recompute" for hybrid models; Spillway's connector recomputes nevertheless.
            transfer["kv_load_failure_policy"] = "fail"
        arguments += ["--kv-transfer-config", _compact(transfer)]
    return [*arguments, *settings.extra_args]


def node_arguments(settings: EngineSettings) -> list[str]:
    """Say which ranks of a replica over several pods are this pod's, and where all meet."""
    nodes, index, cores = settings.nodes_per_replica, settings.node_rank, settings.cores_here
    if nodes == 1:
        return []
    port = str(RENDEZVOUS_PORT)
    if settings.data_parallel_size > 1:
        given = ["--data-parallel-size-local", str(cores), "--data-parallel-address", settings.leader]
        given += ["--data-parallel-rpc-port", port]
        return [*given, "--headless", "--data-parallel-start-rank", str(index * cores)] if index else given
    given = ["--nnodes", str(nodes), "--node-rank", str(index), "--master-addr", settings.leader, "--master-port", port]
    return [*given, "--headless"] if index else given


def lora_arguments(settings: EngineSettings) -> list[str]:
    """The arguments of LoRA; none without adapters, because vLLM's kernels for adapters cost memory and time."""
    lora = settings.lora
    if not lora.enabled:
        return []
    limits = ["--max-lora-rank", str(lora.max_rank), "--max-loras", str(lora.max_active)]
    if lora.max_in_memory is not None:
        limits += ["--max-cpu-loras", str(lora.max_in_memory)]
    modules = [
        _compact({"name": adapter.name, "path": adapter.path, "base_model_name": settings.served_name})
        for adapter in lora.adapters
    ]
    return ["--enable-lora", *limits, *(["--lora-modules", *modules] if modules else [])]


def server_environment(settings: EngineSettings, machine: Machine, model_is_folder: bool) -> dict[str, str]:
    """Variables added to the parent's environment; the user's extraEnv wins, except over the hash seed."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if model_is_folder and all(adapter.is_folder for adapter in settings.lora.adapters):
        environment["HF_HUB_OFFLINE"] = "1"
    if settings.lora.runtime_updating:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.lora.resolver_folder is not None:
        environment["VLLM_LORA_RESOLVER_CACHE_DIR"] = settings.lora.resolver_folder
    if settings.allowed_media_domains:
        environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"  # which lead to any host
    if machine.platform == "cpu":
        environment |= cpu_thread_environment(settings, machine)
        # Even with --enforce-eager some small functions are compiled at the first call, by a C++ compiler that a
        # machine need not have (the engine then dies with InvalidCxxCompiler) and at the price of a slower start.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    # The chain of block hashes starts from this seed; two engines with different seeds never share a block.
    return {**environment, **settings.extra_env, "PYTHONHASHSEED": "0"}


def cpu_thread_environment(settings: EngineSettings, machine: Machine) -> dict[str, str]:
    """All cores of a small machine to whichever engine is busy.

    vLLM's own choice (`auto`) reserves one core, and a second one as soon as a KV connector is configured, which leaves
    none on two cores. A 2,048-token prompt of SmolLM2-135M in bfloat16 on two cores, another engine idle beside it,
    medians of 7: auto 4.3 s, unbound threads 2.4 s, bound to both cores 2.2 s.

    `auto` also wants a NUMA node for each worker, and vLLM a list of cores for each if it is not `auto`. Workers of
    one engine core compute at the same time, so they share its cores out; on a small machine every data parallel rank
    has all of them, elsewhere a part of its own.
    """
    small, workers, cores = len(machine.cores) <= SMALL_MACHINE_CORES, settings.ranks_here, settings.cores_here
    if small:
        lists = _shares(machine.cores, workers) * cores
    elif machine.memory_nodes >= (every := workers * cores) or every == 1:
        return {}
    else:
        lists = _shares(machine.cores, every)
    # Engines that share cores sleep at the end of a parallel region. By default their threads spin there, which keeps
    # the other engine's off the core.
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"} if small else {}
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, cores)) for cores in lists), **waiting}


def _shares(cores: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Split the cores into consecutive runs of equal length; all cores in each if there are fewer than parts."""
    length = len(cores) // parts
    return [cores[at * length : (at + 1) * length] if length else cores for at in range(parts)]


def kv_events_config(settings: EngineSettings) -> dict[str, Any]:
    """Endpoints are bound by the engine; `replay` answers a gateway that missed some.

    vLLM binds an endpoint with `*` or `::` in it and *connects* to any other, whichever process listens there; so one
    address of this host is written as the IPv4-mapped IPv6 address that it also is.
    """
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{_bind_host(settings)}:{settings.kv_events.port}",
        "replay_endpoint": f"tcp://{_bind_host(settings)}:{settings.kv_events.replay_port}",
        "topic": "kv-events",
    }


def kv_transfer_config(settings: EngineSettings) -> dict[str, Any] | None:
    """The configuration of all connectors of the engine."""
    other = settings.kv_transfer
    if not settings.offload.enabled:
        return None if other is None else alone(other)
    own = own_transfer_config(settings)
    return own if other is None else combined(other, own)


def own_transfer_config(settings: EngineSettings) -> dict[str, Any]:
    """Return the configuration that vLLM passes to Spillway's connector; its config module explains the keys."""
    offload = settings.offload
    options = {name: getattr(offload, name) for name in ConnectorConfig.__struct_fields__}
    for name in ("copy_table", "node_tier"):
        if options[name] is not None:
            options[name] = settings_tree(options[name])
    given = {name: value for name, value in options.items() if value is not None}
    tiers = [*secondary_tiers(offload.shared_tier), *offload.extra_tiers]
    return transfer_config({**given, "secondary_tiers": tiers})


def public_configuration(settings: EngineSettings, budget: MemoryBudget) -> dict[str, Any]:
    """Return the document of GET /spillway/config and --print-config, without extraEnv's values: they may be secret."""
    tree = settings_tree(settings)
    tree["extraEnv"] = sorted(settings.extra_env)
    tree["extraArgs"] = without_secrets(settings.extra_args)
    return {"settings": tree, "servedName": settings.served_name, "memory": budget.report()}


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The same command line with the values of --api-key and its like replaced by ***."""
    shown: list[str] = []
    hide = False
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            secret = is_secret(argument)
            shown.append(f"{name}=***" if secret and equals else argument)
            hide = secret and not equals
        else:
            shown.append("***" if hide else argument)
    return shown


def _bind_host(settings: EngineSettings) -> str:
    if settings.host in ("0.0.0.0", "::", ""):  # noqa: S104  compared, not bound
        return "*"
    try:
        address = ipaddress.ip_address(settings.host)
    except ValueError:
        return "*"  # a name, which a bound socket cannot carry
    return f"[::ffff:{address}]" if address.version == 4 else f"[{address}]"


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
