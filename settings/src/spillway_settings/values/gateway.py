"""`gateway`: the entry point."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from spillway_settings.session_sources import SESSION_SOURCE_PATTERN, SESSION_SOURCES
from spillway_settings.typed import Count, NotNegative, Port, Portion, Positive, Share, Text
from spillway_settings.values import kubernetes
from spillway_settings.values.kinds import (
    SECONDS_MAX,
    Annotations,
    Cores,
    GivenHost,
    Host,
    HttpMethods,
    HttpNames,
    IngressPath,
    Labels,
    Network,
    ObjectName,
    Origin,
    Seconds,
    SecondsOrNone,
    SecretEntry,
    SecretName,
    Section,
    Size,
    SomePods,
    WholeSecondsOrNone,
)
from spillway_settings.values.pods import (
    CertificateSecret,
    Image,
    PodDisruptionBudget,
    PodSettings,
    Probes,
    SecretReference,
    StartupProbe,
    TopologySpread,
    restricted_container,
    restricted_pod,
)
from spillway_settings.wire import RETENTION_SECONDS_MAX

RETENTION_TIER_SHARE_MAX = 0.5  # the rest of a tier is there for what is not retained
PROCESSES_MAX = 16  # behind one port
NODE_PORTS = (30000, 32767)  # of an API server that was given no other range


class GatewayService(Section, frozen=True):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Port = 80
    node_port: Port | None = None
    annotations: Annotations = {}
    labels: Labels = {}
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"] | None = None
    ip_families: Annotated[
        list[Literal["IPv4", "IPv6"]], Meta(max_length=2, extra_json_schema={"uniqueItems": True})
    ] = []
    external_traffic_policy: Literal["Cluster", "Local"] | None = None
    load_balancer_class: Annotated[
        str,
        Meta(
            pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$",
            description="a name like that of a label, such as example.com/internal",
        ),
    ] = ""
    load_balancer_source_ranges: list[Network] = []


class Timeouts(Section, frozen=True):
    connect_seconds: Seconds = 2
    first_byte_seconds: Seconds = 300
    idle_seconds: Seconds = 120
    keep_alive_seconds: SecondsOrNone = 30
    plain_seconds: Seconds = 900
    body_read_seconds: Seconds = 60


class Health(Section, frozen=True):
    period_seconds: Seconds = 1
    timeout_seconds: Seconds = 2
    timeouts_before_down: Count = 3
    metrics_period_seconds: Seconds = 1
    return_seconds: SecondsOrNone = 2
    ending_seconds: Seconds | None = None


class Limits(Section, frozen=True):
    body_bytes_max: Size = "64MiB"
    bodies_bytes_max: Size = "256MiB"
    plain_reply_buffer_bytes: Size = "4MiB"
    replies_bytes_max: Size = "128MiB"
    attempts_max: Count = 3
    ended_engines_max: Count = 2
    suspect_seconds: Seconds = 600
    retry_ratio: NotNegative = 0.2
    retry_burst: Annotated[int, Meta(ge=0)] = 64
    upstream_connections_max: Count = 4096
    text_chars_max: Count = 262144


class Connections(Section, frozen=True):
    open_max: Count = 8192
    per_address_max: Count = 6144
    head_bytes_max: Size = "64KiB"
    target_bytes_max: Size = "8KiB"
    headers_max: Count = 128
    head_seconds: Seconds = 15
    idle_seconds: Seconds = 75
    stalled_seconds: Seconds = 60
    body_bytes_per_second_min: Size = "64KiB"


SessionSources = Annotated[
    list[
        Annotated[
            str,
            Meta(
                pattern=SESSION_SOURCE_PATTERN,
                description="a header's name, body:prompt_cache_key or body:metadata.user_id",
            ),
        ]
    ],
    Meta(max_length=32, extra_json_schema={"uniqueItems": True}),
]


class Routing(Section, frozen=True):
    prefill_tokens_per_second: Positive = 5000
    cpu_load_tokens_per_second: Positive = 100000
    shared_load_tokens_per_second: Positive = 40000
    shared_store_tokens_per_second: Positive | None = None
    running_request_ms: NotNegative = 10
    bounded_load_factor: Annotated[float, Meta(ge=1)] = 1.25
    adapter_load_seconds: SecondsOrNone = 2
    slow_start_seconds: SecondsOrNone = 10
    warm_start_seconds: SecondsOrNone = 5
    default_block_tokens: Count = 128
    speculative_seconds: Seconds = 60
    approximate_seconds: Seconds = 900
    tenant_sessions_max: Count = 10000
    sessions_max: Count = 100000
    session_sources: SessionSources = msgspec.field(default_factory=lambda: list(SESSION_SOURCES))
    session_name_bytes_max: Annotated[int, Meta(ge=1, le=65536)] = 4096


class Retention(Section, frozen=True):
    seconds_max: Annotated[float, Meta(ge=0, le=RETENTION_SECONDS_MAX)] = 0
    tier_share: Annotated[float, Meta(ge=0, le=RETENTION_TIER_SHARE_MAX)] = 0.1


class Continuation(Section, frozen=True):
    enabled: bool = False
    attempts_max: Count = 3
    pause_seconds: Seconds = 30
    stall_seconds: Seconds = 30
    tokens_max: Count = 32768
    bytes_max: Size = "64MiB"


class Disaggregation(Section, frozen=True):
    mode: Annotated[str | bool, Meta(extra_json_schema={"enum": ["auto", "always", "off", False]})] = "auto"
    strict_roles: bool = False
    hand_over: Literal["store", "connector"] = "store"
    uncached_tokens_min: Count = 1024
    token_ms_max: Positive | None = None
    hand_over_ms: NotNegative = 50
    hand_over_seconds_max: Seconds = 2
    prefill_seconds_max: Seconds = 60

    @property
    def roles_bind(self) -> bool:
        """Whether prefill engines answer whole requests only if no other engine can."""
        return self.strict_roles or self.mode == "always"


class Breaker(Section, frozen=True):
    failures: Count = 5
    window_requests: Count = 20
    failure_share: Share = 0.3
    open_seconds: Seconds = 5
    open_seconds_max: Seconds = 60


class Admission(Section, frozen=True):
    requests_per_engine_max: Count = 1024
    waiting_requests_max: Count = 1024
    high_wait_seconds: Seconds = 60
    normal_wait_seconds: Seconds = 30
    low_wait_seconds: Seconds = 10
    session_half_life_seconds: SecondsOrNone = 60
    promotion_hints: bool = True


class LimitsLogin(Section, frozen=True):
    name: SecretName = ""
    username_key: SecretEntry = ""
    password_key: SecretEntry = "password"


class SharedLimits(Section, frozen=True):
    url: str = ""
    existing_secret: LimitsLogin = LimitsLogin()
    ca_secret: SecretReference = SecretReference(key="ca.crt")
    key_prefix: Annotated[
        str,
        Meta(
            max_length=128,
            pattern=r"^[^{]*$",
            description="a prefix without an opening brace (the gateway adds its own hash tag)",
        ),
    ] = "spillway:limits:1:"
    connections: Count = 8
    timeout_seconds: Seconds = 0.05
    failures: Count = 3
    retry_seconds_max: Seconds = 5
    report_seconds: Seconds = 0.1
    lease_seconds: Seconds = 30


class Auth(Section, frozen=True):
    keys_secret: SecretReference = SecretReference(key="keys.yaml")
    salt_secret: SecretReference = SecretReference(key="secret")
    engine_key_secret: SecretReference = SecretReference(key="api-key")
    reload_seconds: Seconds = 2
    unsalted_routes: Literal["refuse", "allow"] = "refuse"
    kv_transfer_tenants: Annotated[
        list[Annotated[str, Meta(min_length=1, description="the name of a tenant in keysSecret")]],
        Meta(max_length=64, extra_json_schema={"uniqueItems": True}),
    ] = []
    shared_limits: SharedLimits = SharedLimits()


class Cors(Section, frozen=True):
    origins: Annotated[list[Origin], Meta(max_length=64, extra_json_schema={"uniqueItems": True})] = msgspec.field(
        default_factory=lambda: ["*"]
    )
    methods: HttpMethods = msgspec.field(default_factory=lambda: ["*"])
    headers: HttpNames = msgspec.field(default_factory=lambda: ["*"])


class Tracing(Section, frozen=True):
    otlp_endpoint: (
        Annotated[
            str,
            Meta(min_length=1, description="an OTLP/HTTP receiver, such as http://collector:4318/v1/traces, or null"),
        ]
        | None
    ) = None
    sample_ratio: Portion = 1
    service_name: Text = "spillway-gateway"
    export_seconds: Seconds = 5
    waiting_spans_max: Count = 8192


class Audit(Section, frozen=True):
    enabled: bool = False
    file: Annotated[str, Meta(pattern=r"^/.*[^/]$", description="an absolute path of a file")] | None = None
    waiting_lines_max: Count = 10000


class Reload(Section, frozen=True):
    period_seconds: SecondsOrNone = 2


class GatewayTls(Section, frozen=True):
    secret: CertificateSecret = CertificateSecret()
    reload_seconds: Seconds = 5


class Index(Section, frozen=True):
    bytes_max: Size = "256MiB"
    orphans_max: Count = 4096


class Log(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = False


class GatewayLifecycle(Section, frozen=True):
    startup_timeout_seconds: Annotated[float, Meta(ge=10, le=SECONDS_MAX)] = 60
    pre_stop_seconds: WholeSecondsOrNone = 5
    drain_delay_seconds: SecondsOrNone = 1
    drain_timeout_seconds: SecondsOrNone = 300


class ResourceRequests(Section, frozen=True):
    cpu: Cores | None = "1"
    memory: Size = "1GiB"
    ephemeral_storage: Size | None = None


class ResourceLimits(Section, frozen=True):
    cpu: Cores | None = None
    memory: Size | None = "2GiB"
    ephemeral_storage: Size | None = None


class GatewayResources(Section, frozen=True):
    requests: ResourceRequests = ResourceRequests()
    limits: ResourceLimits = ResourceLimits()


class GatewayAutoscaling(Section, frozen=True):
    enabled: bool = False
    min_replicas: Count = 2
    max_replicas: SomePods = 8
    cpu_percent: Annotated[int, Meta(ge=1, le=1000)] = 70
    extra_metrics: list[kubernetes.MetricSpec] = []
    behavior: kubernetes.HorizontalPodAutoscalerBehavior = {}


class IngressHost(Section, frozen=True):
    host: GivenHost
    path: IngressPath | UnsetType = UNSET


class IngressCertificate(Section, frozen=True):
    secret_name: SecretName
    hosts: list[GivenHost] | UnsetType = UNSET


class Ingress(Section, frozen=True):
    enabled: bool = False
    class_name: ObjectName = ""
    host: Host = ""
    path: IngressPath = "/"
    path_type: Literal["Prefix", "Exact", "ImplementationSpecific"] = "Prefix"
    tls_secret: SecretName = ""
    hosts: list[IngressHost] = []
    tls: list[IngressCertificate] = []
    annotations: Annotations = {}


class ParentReference(Section, frozen=True):
    name: ObjectName
    group: ObjectName | UnsetType = UNSET
    kind: (
        Annotated[str, Meta(pattern=r"^[A-Z][A-Za-z0-9]*$", description="a kind, such as Gateway or Service")]
        | UnsetType
    ) = UNSET
    namespace: ObjectName | UnsetType = UNSET
    section_name: ObjectName | UnsetType = UNSET
    port: Port | UnsetType = UNSET


RouteFilter = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"required": ["type"], "properties": {"type": {"type": "string"}}}),
]


class HttpRoute(Section, frozen=True):
    enabled: bool = False
    parent_refs: Annotated[list[ParentReference], Meta(max_length=32, extra_json_schema={"uniqueItems": True})] = []
    hostnames: Annotated[list[GivenHost], Meta(max_length=16, extra_json_schema={"uniqueItems": True})] = []
    request_timeout_seconds: Annotated[int, Meta(ge=0, le=99999)] = 0
    filters: list[RouteFilter] = []
    annotations: Annotations = {}


class Picker(Section, frozen=True):
    enabled: bool = False
    port: Port = 9002
    failure_mode: Literal["FailClose", "FailOpen"] = "FailClose"
    labels: Labels = {}


class Discovery(Section, frozen=True):
    type: Literal["kubernetes", "dns", "static"] = "kubernetes"
    pod_deletion_cost_seconds: Seconds = 30


class Rbac(Section, frozen=True):
    create: bool = True


class Gateway(PodSettings, frozen=True):
    replicas: SomePods = 2
    processes: Annotated[int, Meta(ge=1, le=PROCESSES_MAX)] = 1
    image: Image = Image(repository="spillway-gateway")
    port: Port = 8000
    service: GatewayService = GatewayService()
    timeouts: Timeouts = Timeouts()
    health: Health = Health()
    limits: Limits = Limits()
    connections: Connections = Connections()
    routing: Routing = Routing()
    retention: Retention = Retention()
    continuation: Continuation = Continuation()
    disaggregation: Disaggregation = Disaggregation()
    breaker: Breaker = Breaker()
    admission: Admission = Admission()
    auth: Auth = Auth()
    cors: Cors = Cors()
    tracing: Tracing = Tracing()
    audit: Audit = Audit()
    reload: Reload = Reload()
    ops_port: Port | None = 8001
    tls: GatewayTls = GatewayTls()
    index: Index = Index()
    log: Log = Log()
    lifecycle: GatewayLifecycle = GatewayLifecycle()
    resources: GatewayResources = GatewayResources()
    probes: Probes = Probes(startup=StartupProbe(period_seconds=2))
    topology_spread_constraints: list[kubernetes.TopologySpreadConstraint] = []
    autoscaling: GatewayAutoscaling = GatewayAutoscaling()
    pod_disruption_budget: PodDisruptionBudget = PodDisruptionBudget()
    topology_spread: TopologySpread = TopologySpread()
    ingress: Ingress = Ingress()
    http_route: HttpRoute = HttpRoute()
    picker: Picker = Picker()
    discovery: Discovery = Discovery()
    rbac: Rbac = Rbac()
    pod_security_context: kubernetes.PodSecurityContext = msgspec.field(default_factory=restricted_pod)
    security_context: kubernetes.SecurityContext = msgspec.field(default_factory=restricted_container)
