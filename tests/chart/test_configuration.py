"""Rendered ConfigMaps go through the real readers of the engine service and the gateway and mean what values say."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from chart.rendering import CHART, EXAMPLES, VALUES_FILES, environment, nested, pod_spec, render
from msgspec import structs

from spillway_connector.config import (
    ConnectorConfig,
    EncryptionConfig,
    NvmeTierConfig,
    RedisTierConfig,
    RedisTls,
    parse_tier,
)
from spillway_connector.errors import ConfigError
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.transfer.shared_tier import TransferLimits
from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings
from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import load_engine_settings
from spillway_engine.vllm_arguments import kv_transfer_config
from spillway_gateway.config.settings import (
    AuthConfig,
    EngineConfig,
    GatewayConfig,
    ListenConfig,
    ModelConfig,
    TlsConfig,
    load_config,
)
from spillway_gateway.config.shared_limits import SharedLimitsConfig

GIB = 1 << 30


def engine_workloads(rendered):
    return [*rendered.of_kind("StatefulSet", "engine"), *rendered.of_kind("LeaderWorkerSet", "engine")]


@pytest.fixture
def engine_of(tmp_path):
    """Render -> the settings that a pod of one engine group loads, with the arguments of its container."""

    def load(rendered, name="chat-spillway-engine"):
        file = tmp_path / f"{name}.yaml"
        file.write_text(rendered.named("ConfigMap", name)["data"]["engine.yaml"])
        (workload,) = (item for item in engine_workloads(rendered) if item["metadata"]["name"] == name)
        arguments = pod_spec(workload)["containers"][0]["args"]
        assert arguments[:2] == ["--config", "/etc/spillway/engine.yaml"] and set(arguments[2::2]) == {"--set"}
        given = {"POD_NAME": f"{name}-0", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": f"{name}-0.{name}.llm"}
        return load_engine_settings(
            file, [re.sub(r"[$][(](\w+)[)]", lambda found: given[found[1]], text) for text in arguments[3::2]]
        )

    return load


@pytest.fixture
def gateway_of(tmp_path):
    def load(rendered):
        file = tmp_path / "gateway.yaml"
        file.write_text(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])
        return load_config(file)

    return load


ROLES = {
    "engine": {"offload": {"sharedTier": {"type": "redis"}}},
    "engines": {"d": {"role": "decode"}, "p": {"role": "prefill"}, "w": {}},
    "redis": {"enabled": True},
}


def test_groups_of_one_served_name_are_one_model_with_the_roles_of_its_engines(gateway_of):
    (model,) = gateway_of(render(values=ROLES)).models
    found = model.discovery.kubernetes
    assert (found.service, found.role.value) == ("chat-spillway-engine-d-pods", "decode")
    services = {"chat-spillway-engine-p-pods": "prefill", "chat-spillway-engine-w-pods": "both"}
    assert {name: role.value for name, role in found.role_services.items()} == services

    listing = nested("gateway.discovery.type", "static")
    (model,) = gateway_of(render(values={**ROLES, **listing})).models
    assert [engine.role.value for engine in model.engines] == ["decode"] * 2 + ["prefill"] * 2 + ["both"] * 2
    assert len({engine.url for engine in model.engines}) == 6


def test_a_group_with_a_role_scales_by_the_requests_of_its_own_pods():
    scaling = {"autoscaling": {"enabled": True}}
    engines = {"d": {"role": "decode", **scaling}, "p": {"role": "prefill", **scaling}}
    rendered = render(values={**ROLES, "engines": engines})
    queries = {
        group: rendered.named("ScaledObject", f"chat-spillway-engine-{group}")["spec"]["triggers"][0]["metadata"][
            "query"
        ]
        for group in engines
    }
    for group, query in queries.items():
        pattern = re.search(r'pod=~"([^"]+)"', query)[1]
        assert re.fullmatch(pattern, f"chat-spillway-engine-{group}-0")
        others = [f"chat-spillway-engine-{other}-0" for other in ("d", "p", f"{group}-2") if other != group]
        assert not any(re.fullmatch(pattern, other) for other in others)


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
def test_every_values_file_is_read_by_the_processes(file, engine_of, gateway_of):
    """Engines are found through the Service that has their ports, or listed by the names that it gives them."""
    rendered = render(file)
    gateway = gateway_of(rendered)
    listing = gateway_of(render(file, values=nested("gateway.discovery.type", "static")))

    workloads = engine_workloads(rendered)
    served = {engine_of(rendered, workload["metadata"]["name"]).served_name for workload in workloads}
    assert {model.name for model in gateway.models} == served and len(gateway.models) == len(served)
    for workload in workloads:
        name = workload["metadata"]["name"]
        engine = engine_of(rendered, name)
        assert engine.name == f"{name}-0"
        model, listed = (
            next(model for model in config.models if model.name == engine.served_name) for config in (gateway, listing)
        )
        service = rendered.named("Service", f"{name}-pods")
        naming = workload["spec"].get("serviceName", name)  # a LeaderWorkerSet's Service has its name
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        found = model.discovery.kubernetes
        assert service["metadata"]["name"] in (found.service, *found.role_services)
        assert found.namespace == "llm" and not model.engines
        assert ports[found.port] == engine.port
        assert ports[found.kv_events_port] == engine.kv_events.port
        assert ports[found.kv_replay_port] == engine.kv_events.replay_port
        host = f"{name}-0.{naming}.llm.svc.cluster.local"
        first = next(one for one in listed.engines if one.name == engine.name)
        assert first.url == f"http://{host}:{engine.port}" and ports["http"] == engine.port
        assert first.kv_events == f"tcp://{host}:{engine.kv_events.port}"
        assert first.kv_replay == f"tcp://{host}:{engine.kv_events.replay_port}"


OFFLOAD = yaml.safe_load("""
numCpuBlocks: null
cpuBytes: 64GiB
blocksPerChunk: 4
generatedTokens: false
storing: eager
queueOrder: arrival
queueOvertakeSeconds: 2.5
layerwiseLoads: true
computeWhileLoading: true
fairSteps: true
windowChunks: all
evictionPolicy: arc
batchMemcpy: true
maxCopyDescriptors: 64
transport: npu
aclLibraryPath: /emulator/libascendcl.so
weightsVersion: step 7
prefillTokensPerSecond: 2500000
requestWaitSeconds: 1.5
promotionInFlightFraction: 0.25
promotionPerRequestFraction: 1
promotionAheadFraction: 0.125
extraTiers: [{type: fs, root_dir: /x, size: 3000000000}]
""")
LIMITS = yaml.safe_load("""
ioThreads: 12
lookupTimeoutSeconds: 0.5
loadTimeoutSeconds: 3
storeTimeoutSeconds: 7.5
loadQueueBytesMax: 16GiB
storeQueueBytesMax: 512MiB
storeQueueSecondsMax: 2
encryption: {enabled: true, keyId: "2026", keySecretName: kv-key, keySecretKey: secret}
""")
PARSED_LIMITS = TransferLimits(12, 0.5, 3, 7.5, 16 * GIB, GIB // 2, 2)
SECRETS = "/var/lib/spillway/secrets"


def connector_tier(settings):
    """Return this engine's shared tier as its connector parses it."""
    extra = kv_transfer_config(settings)["kv_connector_extra_config"]
    options = dict(extra["secondary_tiers"][0])
    return parse_tier(options.pop("type"), options)


def secret_files(pod):
    """Path in the pod -> (Secret, key); read-only, for the pod's user alone."""
    (volume,) = (volume["projected"] for volume in pod["volumes"] if volume["name"] == "secrets")
    (mount,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "secrets")
    assert mount["readOnly"] and volume["defaultMode"] == 0o400
    return {
        f"{mount['mountPath']}/{item['path']}": (source["secret"]["name"], item["key"])
        for source in volume["sources"]
        for item in source["secret"]["items"]
    }


def test_offload_values_reach_the_connector(engine_of):
    settings = engine_of(render(values={"engine": {"tensorParallelSize": 2, "offload": OFFLOAD}}))
    extra = kv_transfer_config(settings)["kv_connector_extra_config"]

    assert ConnectorConfig.parse(extra) == ConnectorConfig(
        cpu_bytes_to_use=64 * GIB,
        blocks_per_chunk=4,
        generated_tokens="off",
        storing="eager",
        queue_order="arrival",
        queue_overtake_seconds=2.5,
        layerwise_loads="on",
        compute_while_loading="on",
        fair_steps="on",
        window_chunks="all",
        eviction_policy="arc",
        batch_memcpy="on",
        max_copy_descriptors=64,
        transport="npu",
        acl_library_path="/emulator/libascendcl.so",
        weights_version="step 7",
        prefill_tokens_per_second=2_500_000,
        request_wait_seconds=1.5,
        promotion_in_flight_fraction=0.25,
        promotion_per_request_fraction=1,
        promotion_ahead_fraction=0.125,
    )
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": "/x", "size": 3_000_000_000}]


def test_redis_values_reach_the_connector(engine_of):
    redis = {
        "url": "rediss-sentinel://a:1,b:2/main?db=2",
        "existingSecret": {"name": "s", "usernameKey": "u"},
        "tls": {"caSecret": {"name": "ca", "key": "root.pem"}, "clientSecret": {"name": "client"}},
        "ttlSeconds": 60,
        "connections": 9,
        "payloadConnections": 3,
        "tenantMaxBytes": "5GiB",
    }
    rendered = render(values=nested("engine.offload.sharedTier", {"type": "redis", "redis": redis, **LIMITS}))
    tier = connector_tier(engine_of(rendered))
    engine = rendered.one("StatefulSet", "engine")

    assert tier == RedisTierConfig(
        url="rediss-sentinel://a:1,b:2/main?db=2",
        username_env="SPILLWAY_REDIS_USERNAME",
        password_file=f"{SECRETS}/redis-password",
        tls=RedisTls(f"{SECRETS}/redis-ca.crt", f"{SECRETS}/redis-client.crt", f"{SECRETS}/redis-client.key"),
        ttl_seconds=60,
        connections=9,
        payload_connections=3,
        tenant_max_bytes=5 * GIB,
        encryption=EncryptionConfig("2026", f"{SECRETS}/tier-key"),
        limits=PARSED_LIMITS,
    )
    assert environment(engine)[tier.username_env] == {"secretKeyRef": {"name": "s", "key": "u"}}
    assert "SPILLWAY_REDIS_PASSWORD" not in environment(engine)
    assert secret_files(pod_spec(engine)) == {
        tier.password_file: ("s", "password"),
        tier.tls.ca_file: ("ca", "root.pem"),
        tier.tls.certificate_file: ("client", "tls.crt"),
        tier.tls.key_file: ("client", "tls.key"),
        tier.encryption.key_file: ("kv-key", "secret"),
    }


def test_a_password_by_variable(engine_of):
    redis = {"url": "redis://c:6379/0", "existingSecret": {"name": "s", "passwordAs": "env"}}
    rendered = render(values=nested("engine.offload.sharedTier", {"type": "redis", "redis": redis}))
    tier = connector_tier(engine_of(rendered))
    engine = rendered.one("StatefulSet", "engine")

    assert tier == RedisTierConfig(url="redis://c:6379/0", password_env="SPILLWAY_REDIS_PASSWORD")
    assert environment(engine)[tier.password_env] == {"secretKeyRef": {"name": "s", "key": "password"}}
    assert not any(volume["name"] == "secrets" for volume in pod_spec(engine)["volumes"])


def test_nvme_values_reach_the_connector_and_lie_where_the_volume_is_mounted(engine_of):
    nvme = {
        "path": "/kv/cache",
        "mode": "files",
        "maxBytes": "1.5TiB",
        "ttlSeconds": 3600,
        "tenantMaxBytes": "100GiB",
        "pageCache": False,
        "volume": {"type": "sharedClaim", "size": "2TiB"},
    }
    rendered = render(values=nested("engine.offload.sharedTier", {"type": "nvme", "nvme": nvme, **LIMITS}))

    assert connector_tier(engine_of(rendered)) == NvmeTierConfig(
        path="/kv/cache",
        mode="files",
        max_bytes=3 * (1 << 39),
        ttl_seconds=3600,
        tenant_max_bytes=100 * GIB,
        page_cache="off",
        encryption=EncryptionConfig("2026", f"{SECRETS}/tier-key"),
        limits=PARSED_LIMITS,
    )
    pod = pod_spec(rendered.one("StatefulSet", "engine"))
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volume = next(volume for volume in pod["volumes"] if volume["name"] == mounts["/kv/cache"])
    claim = rendered.one("PersistentVolumeClaim")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert claim["spec"]["resources"]["requests"]["storage"] == "2097152Mi"


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("emptyDir", 90 * GIB),
        ("perPodClaim", 90 * GIB),
        ("sharedClaim", 90 * GIB),
        ("hostPath", None),  # the connector measures the file system
        ("existingClaim", None),
    ],
)
def test_a_volume_with_a_size_bounds_the_tier_with_room_to_spare(kind, bound, engine_of):
    own = {"hostPath": {}, "existingClaim": {"claimName": "c"}}
    volume = {"type": kind, **own.get(kind, {"size": "100GiB"})}
    rendered = render(values=nested("engine.offload.sharedTier", {"type": "nvme", "nvme": {"volume": volume}}))

    assert connector_tier(engine_of(rendered)).max_bytes == bound


@pytest.mark.parametrize(
    "url",
    [
        *("redis://h", "redis://h:1/", "rediss://h.example:6380/2", "redis://[fd00::1]:6379/0", "redis-cluster://a"),
        *("redis-sentinel://a,b:1/main", "rediss-sentinel://a:1/main?db=3", "rediss-cluster://a:1,b:2/0"),
        *("http://h", "redis://", "redis://a,b", "redis://h/x", "redis://h/0?db=1", "redis-sentinel://a", "redis:h"),
        *("redis-cluster://a/1", "redis-cluster://a?db=1", "redis-sentinel://a/m?x=1", "redis-proxy://a", "h:6379"),
    ],
)
def test_check_and_connector_accept_the_same_addresses(url):
    try:
        RedisEndpoint.from_url(url)
        understood = True
    except ConfigError:
        understood = False
    values = nested("engine.offload.sharedTier", {"type": "redis", "redis": {"url": url}})

    sentences = [each.sentence for each in findings(values, Cluster())]
    assert understood == (sentences == []) and all("is no address" in sentence for sentence in sentences)


def test_defaults_of_the_connector_are_written_once(engine_of):
    """values.yaml repeats them as documentation; they may not drift apart."""
    extra = kv_transfer_config(engine_of(render()))["kv_connector_extra_config"]

    assert ConnectorConfig.parse(extra) == ConnectorConfig(num_cpu_blocks=2048)
    for tier, own in (
        ({"type": "nvme"}, NvmeTierConfig(path="/var/lib/spillway/kv")),
        ({"type": "redis", "redis": {"url": "redis://h"}}, RedisTierConfig(url="redis://h")),
    ):
        assert connector_tier(engine_of(render(values=nested("engine.offload.sharedTier", tier)))) == own


def test_embedded_server_is_the_one_the_engines_use(engine_of):
    rendered = render(CHART / "values-cpu.yaml", values={"redis": {"port": 7000, "existingSecret": {"name": "pw"}}})
    redis = engine_of(rendered).offload.shared_tier.redis
    service = rendered.one("Service", "redis")

    assert redis.url == f"redis://{service['metadata']['name']}.llm.svc.cluster.local:7000/0"
    assert service["spec"]["ports"][0]["port"] == 7000
    assert environment(rendered.one("StatefulSet", "redis"))["VALKEY_PASSWORD"] == {
        "secretKeyRef": {"name": "pw", "key": "password"}
    }
    assert secret_files(pod_spec(rendered.one("StatefulSet", "engine")))[redis.password_file] == ("pw", "password")
    conf = rendered.one("ConfigMap", "redis")["data"]["valkey.conf"]
    assert "port 7000" in conf and f"maxmemory {3 * GIB // 4}" in conf


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "auto"), ("on", "on"), ("off", "off"), (True, "on"), (False, "off")]
)
def test_batch_memcpy_words(given, meant, engine_of):
    """A bare on or off is true or false to YAML."""
    assert engine_of(render(values={"engine": {"offload": {"batchMemcpy": given}}})).offload.batch_memcpy == meant


@pytest.mark.parametrize(("given", "meant"), [("auto", "auto"), ("off", "off"), (False, "off")])
def test_self_check_words(given, meant, engine_of):
    assert engine_of(render(values={"engine": {"lifecycle": {"selfCheck": given}}})).lifecycle.self_check == meant


def test_the_text_of_the_self_check_reaches_the_engine(engine_of):
    text = "水在一百摄氏度沸腾。法国的首都是巴黎。"
    lifecycle = engine_of(render(values={"engine": {"lifecycle": {"selfCheckText": text}}})).lifecycle

    assert lifecycle.self_check_text == text


def test_another_connector_reaches_vllm_and_its_engines_reach_each_other(engine_of):
    values = {
        "engine": {"kvTransfer": {"connector": "NixlConnector", "extraConfig": {"backends": ["UCX"]}}},
        "networkPolicy": {"restrictEgress": True, "engineEgress": [{"ports": [{"port": 443}]}]},
    }
    rendered = render(values=values)
    policy = rendered.one("NetworkPolicy", "engine")["spec"]

    other, own = kv_transfer_config(engine_of(rendered))["kv_connector_extra_config"]["connectors"]

    assert (other["kv_connector"], other["kv_connector_extra_config"]) == ("NixlConnector", {"backends": ["UCX"]})
    assert own["kv_connector"] == "SpillwayConnector"
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        open_to_all_ports = [rule[peers] for rule in policy[direction] if set(rule) == {peers}]
        assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for [peer] in open_to_all_ports] == [
            "engine"
        ]


@pytest.mark.parametrize("discovery", ["kubernetes", "dns", "static"])
def test_the_gateway_routes_to_every_data_parallel_rank(discovery, gateway_of):
    values = nested("engine", {"dataParallelSize": 3}) | nested("gateway.discovery.type", discovery)
    rendered = render(values=values)
    model = yaml.safe_load(rendered.one("ConfigMap", "gateway")["data"]["gateway.yaml"])["models"][0]
    (read,) = gateway_of(rendered).models

    if discovery == "static":
        assert {engine["dataParallelRanks"] for engine in model["engines"]} == {3}
        assert {engine.data_parallel_ranks for engine in read.engines} == {3}
    else:
        assert model["discovery"][discovery]["dataParallelRanks"] == 3
        assert getattr(read.discovery, discovery).data_parallel_ranks == 3
    one = yaml.safe_load(
        render(values=nested("gateway.discovery.type", discovery)).one("ConfigMap", "gateway")["data"]["gateway.yaml"]
    )
    assert "dataParallelRanks" not in yaml.safe_dump(one)


def test_every_data_parallel_rank_has_two_ports_and_devices_of_its_own(engine_of):
    rendered = render(values={"engine": {"dataParallelSize": 3, "tensorParallelSize": 2}})
    engine, (container,) = engine_of(rendered), pod_spec(rendered.one("StatefulSet", "engine"))["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    service = rendered.one("Service", "engine")["spec"]["ports"]

    assert engine.data_parallel_size == 3
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == 6
    assert ports == {
        "http": 8100,
        **{"kv-events": 8200, "kv-events-1": 8201, "kv-events-2": 8202},
        **{"kv-replay": 8300, "kv-replay-1": 8301, "kv-replay-2": 8302},
    }
    assert {port["name"]: port["port"] for port in service} == ports
    assert all(port["targetPort"] == port["name"] for port in service)
    wanted = [
        {"protocol": "TCP", "port": "http"},
        {"protocol": "TCP", "port": 8200, "endPort": 8202},
        {"protocol": "TCP", "port": 8300, "endPort": 8302},
    ]
    assert rendered.one("NetworkPolicy", "engine")["spec"]["ingress"][0]["ports"] == wanted
    restricted = render(
        values={
            "engine": {"dataParallelSize": 3},
            "networkPolicy": {"restrictEgress": True, "engineEgress": [{"ports": [{"port": 443}]}]},
        }
    )
    assert wanted in [
        rule.get("ports") for rule in restricted.named("NetworkPolicy", "chat-spillway-gateway")["spec"]["egress"]
    ]


def test_an_entry_of_engines_differs_where_it_says_so(engine_of):
    values = {
        "engine": {"nodeSelector": {"a": "b"}, "lifecycle": {"drainTimeoutSeconds": 77}},
        "engines": {
            "large": {
                "model": {"path": "Qwen/Qwen3-32B"},
                "tensorParallelSize": 4,
                "offload": {"cpuBytes": "100GiB"},
                "nodeSelector": {"c": "d"},
            },
            "small": {"replicas": 0, "lifecycle": {"drainTimeoutSeconds": 5}, "offload": {"enabled": False}},
        },
    }
    rendered = render(values=values)
    large, small = (engine_of(rendered, f"chat-spillway-engine-{key}") for key in ("large", "small"))

    assert (large.tensor_parallel_size, small.tensor_parallel_size) == (4, 1)
    assert (large.offload.num_cpu_blocks, large.offload.cpu_bytes_to_use) == (None, 100 * GIB)
    assert (large.lifecycle.drain_timeout_seconds, small.lifecycle.drain_timeout_seconds) == (77, 5)
    assert not small.offload.enabled
    pods = [pod_spec(rendered.named("StatefulSet", f"chat-spillway-engine-{key}")) for key in ("large", "small")]
    assert [pod["nodeSelector"] for pod in pods] == [{"a": "b", "c": "d"}, {"a": "b"}]


def camel(name):
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def fields_of(settings):
    return set(settings.__struct_fields__)


def another(value, name):
    """A valid value that differs from a default."""
    if value is None:
        known = {"file": "/audit/lines.jsonl", "otlp_endpoint": "http://collector:4318/v1/traces"}
        return known.get(name, 123.5)
    if isinstance(value, tuple):
        return {"origins": ("https://chat.example.com",)}.get(name, ("POST",))
    if isinstance(value, list):
        return [f"other-{value[0]}", *value[1:]]
    if isinstance(value, str):
        return {"info": "debug", "auto": "always", "store": "connector"}.get(value, f"other-{value}")
    return not value if isinstance(value, bool) else value / 2 if name == "sample_ratio" else value * 2


# Written by the chart from engines, service and lifecycle; the rest has a section of its name under `gateway`.
ELSEWHERE = {"models", "listen", "shutdown"}
NUMBERS = {"processes"}  # which stand under `gateway` themselves
SECTIONS = sorted(fields_of(GatewayConfig) - ELSEWHERE - NUMBERS)
AUTH = {"keys_file": "keysSecret", "salt_secret_file": "saltSecret", "engine_key_file": "engineKeySecret"}


def test_every_setting_of_the_gateway_is_a_value():
    """A setting that the gateway learns fails here until the chart says it too, under the same name."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    own = GatewayConfig(models=())

    for section in SECTIONS:
        settings = {AUTH.get(name, camel(name)) for name in fields_of(getattr(own, section))}
        assert settings == set(values["gateway"][section]), section
    assert {camel(name) for name in NUMBERS} < set(values["gateway"])
    assert {camel(name) for name in fields_of(own.shutdown)} < set(values["gateway"]["lifecycle"])
    # listenAddress is both hosts'.
    assert fields_of(own.listen) == {"host", "port", "ops_port", "ops_host", "picker_port", "tls"}
    assert {camel(name) for name in fields_of(TlsConfig)} == {"certFile", "keyFile", "reloadSeconds"}
    assert fields_of(ModelConfig) == {
        *("name", "engines", "discovery", "aliases", "adapters", "loadable_adapters", "adapter_aliases"),
        *("tokenizer", "wake_seconds"),
    }  # of `engine`
    limits = {camel(name) for name in fields_of(SharedLimitsConfig)} - {"usernameEnv", "passwordEnv", "tlsCaFile"}
    assert limits | {"existingSecret", "caSecret"} == set(values["gateway"]["auth"]["sharedLimits"])
    assert fields_of(EngineConfig) == {
        "name",
        "url",
        "kv_events",
        "kv_replay",
        "data_parallel_ranks",
        "role",
        "workers",
    }


@pytest.mark.parametrize("section", [section for section in SECTIONS if section != "auth"])
def test_every_value_of_a_section_reaches_the_gateway(section, gateway_of):
    own = getattr(GatewayConfig(models=()), section)
    given = {name: another(getattr(own, name), name) for name in fields_of(own)}
    values = {camel(name): value for name, value in given.items()}

    folder = {
        "extraVolumes": [{"name": "v", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "v", "mountPath": "/audit"}],
    }
    config = gateway_of(render(values={"gateway": {section: values, **(folder if section == "audit" else {})}}))

    assert getattr(config, section) == type(own)(**given) != own


def test_several_processes_reach_the_gateway(gateway_of):
    assert gateway_of(render(values={"gateway": {"processes": 2}})).processes == 2


def test_limits_that_all_gateways_count_together(gateway_of):
    limits = {
        "url": "rediss://limits:6379/1",
        "existingSecret": {"name": "login", "usernameKey": "user"},
        "caSecret": {"name": "authority"},
        "timeoutSeconds": 0.2,
        "leaseSeconds": 60,
    }
    auth = {"keysSecret": {"name": "k"}, "saltSecret": {"name": "s"}, "sharedLimits": limits}
    rendered = render(values={"gateway": {"auth": auth}})
    login = environment(rendered.one("Deployment", "gateway"))

    assert gateway_of(rendered).auth.shared_limits == SharedLimitsConfig(
        url="rediss://limits:6379/1",
        username_env="SPILLWAY_LIMITS_USERNAME",
        password_env="SPILLWAY_LIMITS_PASSWORD",
        tls_ca_file=f"{SECRETS}/limits-ca.crt",
        timeout_seconds=0.2,
        lease_seconds=60,
    )
    assert login == {
        "SPILLWAY_LIMITS_USERNAME": {"secretKeyRef": {"name": "login", "key": "user"}},
        "SPILLWAY_LIMITS_PASSWORD": {"secretKeyRef": {"name": "login", "key": "password"}},
    }


def test_secrets_of_the_gateway_become_files(gateway_of):
    auth = {
        "keysSecret": {"name": "tenants", "key": "all.yaml"},
        "saltSecret": {"name": "salt"},
        "engineKeySecret": {"name": "salt", "key": "engine"},
        "reloadSeconds": 7,
        "unsaltedRoutes": "allow",
        "kvTransferTenants": ["router"],
    }
    rendered = render(values={"gateway": {"auth": auth}, "engine": {"apiKeySecret": {"name": "salt", "key": "engine"}}})
    config = gateway_of(rendered)

    assert config.auth == AuthConfig(
        keys_file=f"{SECRETS}/gateway-keys.yaml",
        salt_secret_file=f"{SECRETS}/gateway-salt",
        engine_key_file=f"{SECRETS}/engine-key",
        reload_seconds=7,
        unsalted_routes="allow",
        kv_transfer_tenants=("router",),
    )
    assert secret_files(pod_spec(rendered.one("Deployment", "gateway"))) == {
        config.auth.keys_file: ("tenants", "all.yaml"),
        config.auth.salt_secret_file: ("salt", "secret"),
        config.auth.engine_key_file: ("salt", "engine"),
    }


def test_without_auth_the_gateway_holds_no_secret(gateway_of):
    rendered = render(values={"engine": {"apiKeySecret": {"name": "engine-key"}}})

    assert gateway_of(rendered).auth == AuthConfig()
    assert {volume["name"] for volume in pod_spec(rendered.one("Deployment", "gateway"))["volumes"]} == {
        "config",
        "scratch",
    }


def test_a_certificate_and_a_port_for_operators(gateway_of):
    gateway = {
        "port": 8443,
        "opsPort": 8001,
        "tls": {"secret": {"name": "cert", "privateKeyKey": "private.pem"}, "reloadSeconds": 9},
    }
    rendered = render(values={"gateway": gateway, "monitoring": {"serviceMonitor": {"enabled": True}}})
    config, pod = gateway_of(rendered), pod_spec(rendered.one("Deployment", "gateway"))

    tls = TlsConfig(cert_file=f"{SECRETS}/tls.crt", key_file=f"{SECRETS}/tls.key", reload_seconds=9)
    assert config.listen == ListenConfig(host="0.0.0.0", port=8443, ops_port=8001, tls=tls)
    assert secret_files(pod) == {tls.cert_file: ("cert", "tls.crt"), tls.key_file: ("cert", "private.pem")}
    container = pod["containers"][0]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"http": 8443, "ops": 8001}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        # The operators' port is plain HTTP, and answers however busy the other one is.
        assert container[probe]["httpGet"].keys() == {"path", "port"} and container[probe]["httpGet"]["port"] == "ops"
        assert "scheme" not in pod_spec(rendered.one("StatefulSet", "engine"))["containers"][0][probe]["httpGet"]
    alone = render(values={"gateway": {**gateway, "opsPort": None}})
    (container,) = pod_spec(alone.one("Deployment", "gateway"))["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert (container[probe]["httpGet"]["port"], container[probe]["httpGet"]["scheme"]) == ("http", "HTTPS")
    # Clients' Service leads to the main port alone; Prometheus finds the other one by the pod's name for it.
    (port,) = rendered.one("Service", "gateway")["spec"]["ports"]
    assert (port["targetPort"], port["appProtocol"]) == ("http", "https")
    assert rendered.one("ServiceMonitor")["spec"]["endpoints"][0]["targetPort"] == "ops"
    policy = rendered.named("NetworkPolicy", "chat-spillway-gateway")["spec"]["ingress"]
    ports = [(rule["ports"][0]["port"], "from" in rule) for rule in policy]
    assert ports == [("http", False), ("ops", True), ("ops", True)]
    # `helm test` gets the certificate and not its key.
    test = rendered.one("Pod", "test")["spec"]
    (volume,) = (volume["secret"] for volume in test["volumes"] if volume["name"] == "certificate")
    assert volume == {"secretName": "cert", "items": [{"key": "tls.crt", "path": "tls.crt"}]}
    expected = json.loads(rendered.named("ConfigMap", "chat-spillway-test")["data"]["release.json"])["gateway"]
    assert expected["url"] == "https://chat-spillway-gateway.llm.svc.cluster.local:80" and expected["open"]
    operations = rendered.one("Service", "operations")
    assert operations["spec"]["ports"] == [{"name": "ops", "port": 8001, "targetPort": "ops"}]
    assert operations["spec"]["selector"] == rendered.one("Service", "gateway")["spec"]["selector"]
    assert expected["operations"] == f"http://{operations['metadata']['name']}.llm.svc.cluster.local:8001"


def test_gateway_values_reach_the_gateway(gateway_of):
    values = {
        "timeouts": {"connectSeconds": 1.5, "plainSeconds": 77},
        "limits": {"bodyBytesMax": "3MiB", "retryRatio": 0},
        "index": {"bytesMax": "1GiB"},
        "routing": {"prefillTokensPerSecond": 2500000},
        "log": {"level": "debug", "requests": True},
        "lifecycle": {"drainDelaySeconds": 3, "drainTimeoutSeconds": 44},
        "port": 8080,
        "extraVolumes": [{"name": "tok", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "tok", "mountPath": "/tok"}],
    }
    config = gateway_of(
        render(values={"gateway": values, "engine": {"model": {"aliases": ["a", "b"], "tokenizer": "/tok"}}})
    )

    assert (config.timeouts.connect_seconds, config.timeouts.plain_seconds) == (1.5, 77)
    assert (config.limits.body_bytes_max, config.limits.retry_ratio) == (3 << 20, 0)
    assert config.index.bytes_max == GIB and config.routing.prefill_tokens_per_second == 2_500_000
    assert (config.log.level, config.log.requests) == ("debug", True)
    assert (config.shutdown.drain_delay_seconds, config.shutdown.drain_timeout_seconds) == (3, 44)
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 8080)
    assert config.models[0].aliases == ("a", "b") and config.models[0].tokenizer == "/tok"


def test_tokenizer_folder_is_mounted_into_the_gateway(gateway_of):
    rendered = render(CHART / "examples" / "ascend-mindcluster.yaml")
    pod = pod_spec(rendered.one("Deployment", "gateway"))

    assert gateway_of(rendered).models[0].tokenizer == "/var/lib/spillway/models/default/Qwen3-32B"
    mount = next(
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/var/lib/spillway/models/default"
    )
    volume = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert mount["readOnly"] and volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_autoscaled_engines_are_all_known_to_a_gateway_with_a_list(gateway_of):
    rendered = render(CHART / "examples" / "production.yaml", values=nested("gateway.discovery.type", "static"))

    assert len(gateway_of(rendered).models[0].engines) == 6
    assert rendered.one("ScaledObject")["spec"]["maxReplicaCount"] == 6
    assert "replicas" not in rendered.one("StatefulSet", "engine")["spec"]
    assert "replicas" not in rendered.one("Deployment", "gateway")["spec"]


def test_resolved_command_line_is_what_the_values_mean(engine_of):
    settings = engine_of(render(next(file for file in EXAMPLES if file.stem == "ascend-cce-redis")))
    shape = ModelShape(40, 8, 128, None, "bfloat16", 40960, 0)
    machine = Machine("npu", frozenset(), (0,), 1 << 42, "cgroup limit", 1 << 42, 1 << 42)

    arguments = resolve_engine(settings, shape, machine).public()["arguments"]

    pairs = dict(pairwise(arguments))
    assert pairs["--model"] == "Qwen/Qwen3-14B" and pairs["--tensor-parallel-size"] == "2"
    offload = yaml.safe_load(pairs["--kv-transfer-config"])["kv_connector_extra_config"]
    assert (offload["num_cpu_blocks"], offload["blocks_per_chunk"], offload["batch_memcpy"]) == (4096, 2, "on")
    assert offload["secondary_tiers"][0]["url"] == "rediss://cache.example.com:6380/0"
    assert yaml.safe_load(pairs["--kv-events-config"])["endpoint"] == "tcp://*:8200"


def test_defaults_of_the_gateway_are_written_once(gateway_of):
    """values.yaml repeats the gateway's defaults as documentation; they may not drift apart."""
    config = gateway_of(render())
    own = type(config)(models=config.models)
    health = structs.replace(config.health, ending_seconds=own.health.ending_seconds)  # follows from the engines' drain

    for section in SECTIONS:
        assert getattr(structs.replace(config, health=health), section) == getattr(own, section), section
    assert all(getattr(config, name) == getattr(own, name) for name in NUMBERS)


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({}, 289.8),
        ({"engine": {"lifecycle": {"drainDelaySeconds": 10, "drainTimeoutSeconds": 990}}}, 950.0),
        ({"gateway": {"health": {"endingSeconds": 30}}}, 30.0),
    ],
)
def test_gateways_end_requests_before_engines_do(gateway_of, values, seconds):
    assert gateway_of(render(values=values)).health.ending_seconds == seconds


def test_chart_needs_no_file_outside_itself():
    assert not (CHART / "charts").exists()
    assert "dependencies" not in yaml.safe_load(Path(CHART, "Chart.yaml").read_text())


@pytest.mark.parametrize("key", ["extraEnv", "extraEnvVars"])
def test_a_variable_of_a_preset_is_replaced_and_not_given_twice(key):
    """The API server refuses two entries of one name when an object is applied on the server's side."""
    values = {"extraEnv": {"TASK_QUEUE_ENABLE": "2"}, "extraEnvVars": [{"name": "TASK_QUEUE_ENABLE", "value": "2"}]}

    plain = environment(render().one("StatefulSet", "engine"))
    changed = environment(render(values={"engine": {key: values[key]}}).one("StatefulSet", "engine"))

    assert plain["TASK_QUEUE_ENABLE"] == "1"
    assert changed.get("TASK_QUEUE_ENABLE") == ("2" if key == "extraEnvVars" else None)  # extraEnv: in engine.yaml
    assert changed.keys() | {"TASK_QUEUE_ENABLE"} == plain.keys()
