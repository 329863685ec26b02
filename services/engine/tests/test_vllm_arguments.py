import dataclasses
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from spillway_connector.config import ConnectorConfig, NodeTierConfig
from spillway_connector.limits import TierLimits
from spillway_connector.plan.copy_table import CopyTable
from spillway_connector.setting_names import PLAIN_NAMES
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import argument_value, check_extra_arguments
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import plan_memory
from spillway_engine.model_shape import ModelShape
from spillway_engine.setting_rules import check_settings
from spillway_engine.settings import EngineSettings, ModelSettings, OffloadSettings
from spillway_engine.settings_reader import read_settings
from spillway_engine.vllm_arguments import (
    cpu_thread_environment,
    kv_events_config,
    kv_transfer_config,
    public_configuration,
    server_arguments,
    server_environment,
    without_secrets,
)

SHAPE = ModelShape(30, 3, 64, None, "bfloat16", 8192, 0)
CPU = Machine("cpu", frozenset({"avx512_bf16"}), (0, 1), 12 << 30, "MemAvailable", 6 << 30, 6 << 30)
NPU = Machine("npu", frozenset(), tuple(range(64)), 1 << 40, "MemAvailable", 1 << 40, 1 << 40)
TREE: dict[str, Any] = {
    "name": "engine-3",
    "model": {"path": "/models/x", "servedName": "m"},
    "deviceBlocks": 80,
    "offload": {
        "numCpuBlocks": 96,
        "sharedTier": {"type": "nvme", "nvme": {"path": "/kv", "maxBytes": "4GiB"}},
    },
    "extraArgs": ["--max-num-seqs", "8"],
}


def arguments(tree: dict[str, Any], machine: Machine = CPU) -> list[str]:
    settings = read_settings(EngineSettings, tree)
    return server_arguments(settings, machine, plan_memory(settings, SHAPE, machine))


@pytest.mark.parametrize("machine", [CPU, NPU], ids=["cpu", "npu"])
def test_what_the_engine_writes_no_person_may_add(machine: Machine) -> None:
    """The exceptions change nothing when they are given again; and vLLM takes several --middleware."""
    added = {"--middleware", "--enforce-eager", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"}
    written = {flag for flag in arguments({**TREE, "extraArgs": []}, machine) if flag.startswith("--")}

    assert {"--model", "--kv-transfer-config", "--num-gpu-blocks-override"} < written
    for flag in written - added:
        with pytest.raises(SettingsError):
            check_extra_arguments([flag], PLAIN_NAMES)


@pytest.mark.parametrize(
    ("machine", "binding", "given"),
    [
        (NPU, "on", '{"enable_cpu_binding":true}'),
        (NPU, "off", '{"enable_cpu_binding":false}'),
        (NPU, None, None),
        (CPU, "off", None),
    ],
)
def test_binding_of_cpus_is_vllm_ascends_own_argument(machine: Machine, binding: str | None, given: str | None) -> None:
    assert argument_value(arguments({**TREE, "cpuBinding": binding}, machine), "--additional-config") == given


@pytest.mark.parametrize(
    ("machine", "other", "policy"), [(NPU, None, "fail"), (NPU, "NixlConnector", "recompute"), (CPU, None, "recompute")]
)
def test_vllm_ascend_gets_the_policy_that_it_accepts_for_every_model(
    machine: Machine, other: str | None, policy: str
) -> None:
    """Spillway's connector recomputes nevertheless; beside another one vLLM reads this word alone."""
    tree = {**TREE, "kvTransfer": {"connector": other}} if other else TREE
    transfer = json.loads(argument_value(arguments(tree, machine), "--kv-transfer-config"))
    assert transfer["kv_load_failure_policy"] == policy


def given(settings: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(settings).items() if value is not None}


def test_the_whole_command_line_of_a_cpu_engine() -> None:
    # Only what is set: a new setting of the connector does not belong here.
    tier = {"type": "nvme", "path": "/kv", "max_bytes": 4294967296, "mode": "auto", "page_cache": "auto"}
    transfer = {
        "kv_connector": "SpillwayConnector",
        "kv_connector_module_path": "spillway_connector.engine.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "SpillwayOffloadingSpec",
            "spec_module_path": "spillway_connector.engine.spec",
            **given(ConnectorConfig(num_cpu_blocks=96)),
            "secondary_tiers": [{**tier, **given(TierLimits())}],
        },
    }
    assert arguments(TREE) == [
        "--model", "/models/x",
        "--served-model-name", "m",
        "--host", "127.0.0.1",
        "--port", "8100",
        "--dtype", "bfloat16",
        "--max-model-len", "8192",
        "--seed", "0",
        "--block-size", "128",
        "--tensor-parallel-size", "1",
        "--prefix-caching-hash-algo", "sha256_cbor",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--middleware", "spillway_engine.middleware.ReadinessMiddleware",
        "--num-gpu-blocks-override", "80",
        "--enforce-eager",
        "--kv-cache-memory-bytes", "235929600",
        "--kv-events-config",
        '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://[::ffff:127.0.0.1]:8200",'
        '"replay_endpoint":"tcp://[::ffff:127.0.0.1]:8300","topic":"kv-events"}',
        "--kv-transfer-config", json.dumps(transfer, separators=(",", ":")),
        "--max-num-seqs", "8",
    ]  # fmt: skip


def test_an_accelerator_compiles_and_sizes_its_own_cache() -> None:
    given = arguments({**TREE, "deviceBlocks": None}, NPU)

    assert "--enforce-eager" not in given
    assert "--kv-cache-memory-bytes" not in given
    assert "--num-gpu-blocks-override" not in given


def test_quantised_weights_and_kv_cache_are_vllms_own_settings() -> None:
    given = arguments({**TREE, "model": {**TREE["model"], "kvCacheDtype": "fp8", "quantization": "awq"}})

    assert given[given.index("--kv-cache-dtype") :][:4] == ["--kv-cache-dtype", "fp8", "--quantization", "awq"]


ADAPTERS = [{"name": "support", "path": "/adapters/support"}, {"name": "sql", "path": "owner/sql"}]


def test_adapters_are_named_to_vllm() -> None:
    given = arguments({**TREE, "lora": {"adapters": ADAPTERS, "maxRank": 64, "maxActive": 2, "maxInMemory": 8}})

    start = given.index("--enable-lora")
    assert given[start : start + 10] == [
        "--enable-lora",
        *("--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "8", "--lora-modules"),
        '{"name":"support","path":"/adapters/support","base_model_name":"m"}',
        '{"name":"sql","path":"owner/sql","base_model_name":"m"}',
    ]
    assert not any("lora" in word for word in arguments(TREE))


def test_adapters_that_change_at_run_time_need_no_adapter_at_the_start() -> None:
    lora = {"runtimeUpdating": True, "resolverFolder": "/adapters"}
    given = arguments({**TREE, "lora": lora})
    environment = server_environment(read_settings(EngineSettings, {**TREE, "lora": lora}), CPU, True)

    assert given[given.index("--enable-lora") :][:5] == ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "1"]
    assert "--lora-modules" not in given
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment["VLLM_LORA_RESOLVER_CACHE_DIR"] == "/adapters"
    plain = server_environment(read_settings(EngineSettings, TREE), CPU, True)
    assert not any("LORA" in name for name in plain)


def test_media_of_prompts_come_from_the_named_hosts_alone() -> None:
    tree = {**TREE, "allowedMediaDomains": ["images.example.com", "cdn.example.com"]}
    given = arguments(tree)

    start = given.index("--allowed-media-domains")
    assert given[start : start + 3] == ["--allowed-media-domains", "images.example.com", "cdn.example.com"]
    assert server_environment(read_settings(EngineSettings, tree), CPU, True)["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert "--allowed-media-domains" not in arguments(TREE)
    assert "VLLM_MEDIA_URL_ALLOW_REDIRECTS" not in server_environment(read_settings(EngineSettings, TREE), CPU, True)


@pytest.mark.parametrize("domain", ["https://images.example.com", "images.example.com:443", "Images.example.com", ""])
def test_a_media_host_that_vllm_would_never_find_is_refused(domain: str) -> None:
    with pytest.raises(SettingsError, match="allowedMediaDomains"):
        read_settings(EngineSettings, {**TREE, "allowedMediaDomains": [domain]})


@pytest.mark.parametrize(("adapters", "offline"), [(ADAPTERS[:1], True), (ADAPTERS, False)])
def test_an_adapter_from_a_hub_may_be_downloaded(adapters: list[dict[str, str]], offline: bool) -> None:
    given = read_settings(EngineSettings, {**TREE, "lora": {"adapters": adapters}})

    assert ("HF_HUB_OFFLINE" in server_environment(given, CPU, True)) is offline


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"adapters": [{"name": "m", "path": "/a"}]}, r"lora.adapters\[0\].name: 'm' is served already"),
        ({"adapters": [ADAPTERS[0], ADAPTERS[0]]}, r"lora.adapters\[1\].name: 'support' is served already"),
        ({"adapters": [{"name": "a", "path": "adapters"}]}, r"path: 'adapters' is neither an absolute folder"),
        (
            {"adapters": ADAPTERS, "maxActive": 4, "maxInMemory": 2},
            "maxInMemory: 2 is less than lora.maxActive: 4",
        ),
        ({"resolverFolder": "/a"}, "set lora.runtimeUpdating: true"),
        ({"resolverFolder": "a", "runtimeUpdating": True}, "lora.resolverFolder: a is no absolute folder"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_settings(read_settings(EngineSettings, {**TREE, "lora": lora}))


def test_features_that_are_off_leave_no_argument() -> None:
    given = arguments({**TREE, "offload": {"enabled": False}, "kvEvents": {"enabled": False}})

    assert "--kv-transfer-config" not in given
    assert "--kv-events-config" not in given


def test_every_offload_setting_reaches_the_connector() -> None:
    offload = {
        "cpuBytes": "1GiB",
        "blocksPerChunk": 3,
        "generatedTokens": "off",
        "storing": "auto",
        "queueOrder": "arrival",
        "queueOvertakeSeconds": 2.5,
        "layerwiseLoads": "on",
        "computeWhileLoading": "on",
        "fairSteps": "on",
        "windowChunks": "all",
        "evictionPolicy": "arc",
        "batchMemcpy": "off",
        "maxCopyDescriptors": 64,
        "transport": "npu",
        "aclLibraryPath": "/emulator/libascendcl.so",
        "cudaLibraryPath": "/double/libcuda.so",
        "copyTable": {"store": [[4096, "staged"]], "load": [[4096, "batch"]]},
        "weightsVersion": "step 7",
        "prefillTokensPerSecond": 9000,
        "requestWaitSeconds": 1.5,
        "promotionInFlightFraction": 0.25,
        "promotionPerRequestFraction": 1,
        "promotionAheadFraction": 0,
    }
    extra = kv_transfer_config(read_settings(EngineSettings, {**TREE, "offload": offload}))["kv_connector_extra_config"]

    assert ConnectorConfig.parse(extra) == ConnectorConfig(
        cpu_bytes_to_use=1 << 30,
        blocks_per_chunk=3,
        generated_tokens="off",
        storing="auto",
        queue_order="arrival",
        queue_overtake_seconds=2.5,
        layerwise_loads="on",
        compute_while_loading="on",
        fair_steps="on",
        window_chunks="all",
        eviction_policy="arc",
        batch_memcpy="off",
        max_copy_descriptors=64,
        transport="npu",
        acl_library_path="/emulator/libascendcl.so",
        cuda_library_path="/double/libcuda.so",
        copy_table=CopyTable(store=((4096, "staged"),), load=((4096, "batch"),)),
        weights_version="step 7",
        prefill_tokens_per_second=9000.0,
        request_wait_seconds=1.5,
        promotion_in_flight_fraction=0.25,
        promotion_per_request_fraction=1.0,
        promotion_ahead_fraction=0.0,
    )


def test_the_tier_of_a_node_reaches_the_connector() -> None:
    node = {"bytes": "1GiB", "path": "/node", "fallback": "refuse", "maker": "keeper"}
    settings = read_settings(EngineSettings, {**TREE, "offload": {"numCpuBlocks": 4, "nodeTier": node}})
    extra = json.loads(json.dumps(kv_transfer_config(settings)))["kv_connector_extra_config"]

    found = ConnectorConfig.parse(extra).node_tier
    assert found == NodeTierConfig(bytes=1 << 30, path="/node", fallback="refuse", maker="keeper")


def test_defaults_are_those_of_the_connector() -> None:
    settings = read_settings(EngineSettings, {**TREE, "offload": {"numCpuBlocks": 4}})
    extra = kv_transfer_config(settings)["kv_connector_extra_config"]

    assert ConnectorConfig.parse(extra) == ConnectorConfig(num_cpu_blocks=4)


def test_offload_has_the_settings_of_the_connector_under_camel_case_keys_and_three_of_its_own() -> None:
    assert set(OffloadSettings.__struct_fields__) == {
        *ConnectorConfig.__struct_fields__,
        "enabled",
        "shared_tier",
        "extra_tiers",
    }
    assert {"numCpuBlocks", "cpuBytes", "promotionInFlightFraction", "sharedTier"} < set(
        OffloadSettings.__struct_encode_fields__
    )
    assert not any("_" in key for key in OffloadSettings.__struct_encode_fields__)


def test_tiers_of_vllm_pass_unread_beside_ours() -> None:
    tree = {**TREE, "offload": {"numCpuBlocks": 4, "extraTiers": [{"type": "fs", "root_dir": "/x"}]}}

    assert kv_transfer_config(read_settings(EngineSettings, tree))["kv_connector_extra_config"]["secondary_tiers"] == [
        {"type": "fs", "root_dir": "/x"}
    ]


def test_the_hash_seed_is_nobodys_choice() -> None:
    settings = read_settings(EngineSettings, {**TREE, "extraEnv": {"PYTHONHASHSEED": "7", "A": "b"}})
    environment = server_environment(settings, CPU, model_is_folder=True)

    assert environment["PYTHONHASHSEED"] == "0"
    assert environment["A"] == "b"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in server_environment(settings, CPU, model_is_folder=False)


def test_a_cpu_engine_needs_no_compiler() -> None:
    settings = read_settings(EngineSettings, TREE)
    assert server_environment(settings, CPU, model_is_folder=True)["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in server_environment(settings, NPU, model_is_folder=True)


def test_a_small_machine_computes_on_every_core() -> None:
    assert bound(CPU) == "0,1"
    assert bound(NPU) is None


@pytest.mark.parametrize(
    ("cores", "nodes", "tensor", "data", "lists"),
    [
        (2, 1, 1, 2, "0,1|0,1"),  # either may be the busy one
        (2, 1, 2, 1, "0|1"),  # both compute at once
        (2, 1, 2, 2, "0|1|0|1"),
        (2, 1, 4, 1, "0,1|0,1|0,1|0,1"),  # fewer cores than workers
        (8, 1, 1, 2, "0,1,2,3|4,5,6,7"),  # `auto` wants a NUMA node for each
        (8, 1, 2, 2, "0,1|2,3|4,5|6,7"),
        (8, 2, 1, 2, None),
        (8, 2, 2, 1, None),
        (8, 2, 2, 2, "0,1|2,3|4,5|6,7"),
    ],
)
def test_every_worker_has_a_list_of_cores(cores: int, nodes: int, tensor: int, data: int, lists: str | None) -> None:
    machine = dataclasses.replace(CPU, cores=tuple(range(cores)), memory_nodes=nodes)

    assert bound(machine, tensorParallelSize=tensor, dataParallelSize=data) == lists


@pytest.mark.parametrize(("cores", "policy"), [(2, "PASSIVE"), (4, "PASSIVE"), (8, None)])
def test_threads_of_engines_that_share_cores_sleep_while_they_wait(cores: int, policy: str | None) -> None:
    machine = dataclasses.replace(CPU, cores=tuple(range(cores)), memory_nodes=2)
    settings = read_settings(EngineSettings, {**TREE, "dataParallelSize": 4})

    assert cpu_thread_environment(settings, machine).get("OMP_WAIT_POLICY") == policy


def bound(machine: Machine, **sizes: int) -> str | None:
    settings = read_settings(EngineSettings, {**TREE, **sizes})
    return cpu_thread_environment(settings, machine).get("VLLM_CPU_OMP_THREADS_BIND")


def test_every_data_parallel_rank_has_the_device_cache_of_an_engine() -> None:
    one, two = (read_settings(EngineSettings, {**TREE, "dataParallelSize": ranks}) for ranks in (1, 2))
    alone, both = (server_arguments(each, CPU, plan_memory(each, SHAPE, CPU)) for each in (one, two))

    assert "--data-parallel-size" not in alone
    assert both[both.index("--data-parallel-size") + 1] == "2"
    cache = alone[alone.index("--kv-cache-memory-bytes") + 1]
    assert both[both.index("--kv-cache-memory-bytes") + 1] == cache


@pytest.mark.parametrize(
    ("sizes", "leads", "follows"),
    [
        (
            {"tensorParallelSize": 2, "pipelineParallelSize": 2, "offload": {"enabled": False}},
            "--nnodes 2 --node-rank 0 --master-addr set-0.set --master-port 29500",
            "--nnodes 2 --node-rank 1 --master-addr set-0.set --master-port 29500 --headless",
        ),
        (
            {"dataParallelSize": 4},
            "--data-parallel-size-local 2 --data-parallel-address set-0.set --data-parallel-rpc-port 29500",
            "--data-parallel-size-local 2 --data-parallel-address set-0.set --data-parallel-rpc-port 29500 --headless "
            "--data-parallel-start-rank 2",
        ),
    ],
    ids=["one core over pods", "cores on each pod"],
)
def test_pods_of_one_replica_meet_at_the_first(sizes: dict[str, Any], leads: str, follows: str) -> None:
    for rank, expected in enumerate((leads, follows)):
        tree = {**TREE, **sizes, "nodesPerReplica": 2, "nodeRank": rank, "leader": "set-0.set"}
        settings = read_settings(EngineSettings, tree)
        text = " ".join(server_arguments(settings, CPU, plan_memory(settings, SHAPE, CPU)))
        assert f"{expected} --" in text and ("--headless" in text) == (rank > 0)


def test_keys_on_the_command_line_are_not_shown() -> None:
    given = ["--port", "1", "--api-key", "k1", "--ssl", "--api-key=k2", "--hf-token", "--x", "--tokenizer", "t"]

    assert without_secrets(given) == [
        "--port", "1", "--api-key", "***", "--ssl", "--api-key=***", "--hf-token", "--x", "--tokenizer", "t",
    ]  # fmt: skip


def test_what_is_shown_holds_no_value_of_the_environment() -> None:
    settings = read_settings(EngineSettings, {**TREE, "extraEnv": {"HF_TOKEN": "hf_secret"}})
    shown = json.dumps(public_configuration(settings, plan_memory(settings, SHAPE, CPU)))

    assert "HF_TOKEN" in shown
    assert "hf_secret" not in shown


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("127.0.0.1", "tcp://[::ffff:127.0.0.1]:8200"),
        ("::1", "tcp://[::1]:8200"),
        ("0.0.0.0", "tcp://*:8200"),
        ("engine-0.pods", "tcp://*:8200"),
    ],
)
def test_event_endpoints_are_ones_that_vllm_binds(host: str, endpoint: str) -> None:
    """vLLM connects, silently and forever, to an endpoint without `*` or `::`."""
    settings = replace(EngineSettings(model=ModelSettings(path="/m")), host=host)
    found = kv_events_config(settings)["endpoint"]
    assert found == endpoint
    assert "*" in found or "::" in found
