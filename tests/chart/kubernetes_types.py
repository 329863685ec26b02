"""Kubernetes' own types, as far as values hand them on: settings/src/spillway_settings/values/kubernetes.json.

Made from the newest schema that kubernetes_validate brings, with the words, bounds and rules between fields that a
schema of Kubernetes leaves to its prose.
`UPDATE_GOLDEN=1 pytest tests/chart/test_kubernetes_types.py` writes the file again.
"""

from __future__ import annotations

import json
from typing import Any

from chart.rendering import kubernetes_definitions

NEWEST = "1.36"
VERSIONS = [f"1.{minor}" for minor in range(28, 37)]
CORE = "io.k8s.api.core.v1."
ROOTS = [
    *(f"{CORE}{name}" for name in ("Affinity", "PodSecurityContext", "SecurityContext", "Volume", "VolumeMount")),
    *(f"{CORE}{name}" for name in ("Container", "EnvVarSource", "Toleration", "TopologySpreadConstraint")),
    *(f"io.k8s.api.networking.v1.{name}" for name in ("NetworkPolicyPeer", "NetworkPolicyPort")),
    *(f"{CORE}{name}" for name in ("EnvFromSource", "HostAlias", "PodDNSConfig", "PodResourceClaim")),
    *(f"io.k8s.api.autoscaling.v2.{name}" for name in ("HorizontalPodAutoscalerBehavior", "MetricSpec")),
]
# Read no further: rare, or deep.
OPEN = {
    *("ObjectMeta", "PersistentVolumeClaimTemplate", "AWSElasticBlockStoreVolumeSource", "AzureDiskVolumeSource"),
    *("AzureFileVolumeSource", "CephFSVolumeSource", "CinderVolumeSource", "FCVolumeSource", "FlexVolumeSource"),
    *("FlockerVolumeSource", "GCEPersistentDiskVolumeSource", "GitRepoVolumeSource", "GlusterfsVolumeSource"),
    *("ISCSIVolumeSource", "PhotonPersistentDiskVolumeSource", "PortworxVolumeSource", "QuobyteVolumeSource"),
    *("RBDVolumeSource", "ScaleIOVolumeSource", "StorageOSVolumeSource", "VsphereVirtualDiskVolumeSource"),
    *("WindowsSecurityContextOptions", "ClusterTrustBundleProjection", "PodCertificateProjection"),
}
_QUANTITY = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
_NETWORK = (
    r"^(((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])/(3[0-2]|[12]?[0-9])"
    r"|[0-9a-fA-F]*:[0-9a-fA-F:.]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
_ADDRESS = {
    "pattern": _NETWORK[: _NETWORK.index("/(3[0-2]")] + "|[0-9a-fA-F]*:[0-9a-fA-F:.]*)$",
    "description": "an IP address, such as 10.0.0.5,",
}
_PORT = {"minimum": 1, "maximum": 65535}
_MODE = {"minimum": 0, "maximum": 511}
_PERIOD = {"minimum": 1}
_USER = {"minimum": 0, "maximum": 2147483647}
_OPERATORS = ["In", "NotIn", "Exists", "DoesNotExist"]
_SEGMENT = r"([^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+)"
_RELATIVE = {
    "pattern": rf"^{_SEGMENT}(/{_SEGMENT})*$",
    "description": "a path relative to the volume, without .. in it",
}
_LABEL_KEY = {
    "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    "description": "a label's key of nodes, such as topology.kubernetes.io/zone,",
}
# Keys of resources: cpu, memory, ephemeral-storage, hugepages-2Mi or an extended resource such as rdma/hca.
_RESOURCE = r"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*[KMG]i|[a-z0-9.-]+/[A-Za-z0-9._-]+)$"
_PORT_NAME = {"pattern": "^[a-z0-9-]*[a-z][a-z0-9-]*$", "maxLength": 15, "description": "a port's number or name"}
_DNS_NAME = {
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    "description": "a DNS name in small letters",
}
_SHORT_NAME = {
    "maxLength": 63,
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
    "description": "a name of small letters, digits and dashes",
}
_NAME = {
    "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
    "description": "the name of an object (small letters, digits, dashes and dots)",
}
# Type.field, or a type -> what its prose says.
PROSE: dict[str, dict[str, Any]] = {
    "Quantity": {"pattern": _QUANTITY, "description": "a Kubernetes quantity, such as 10Gi or 500m,"},
    "Container.imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "Container.restartPolicy": {"enum": ["Always", "OnFailure", "Never"]},
    "Container.image": {"pattern": r"^[^\s]+$", "description": "an image without blanks"},
    "Container.name": _SHORT_NAME,
    "Container.terminationMessagePolicy": {"enum": ["File", "FallbackToLogsOnError"]},
    "ContainerPort.containerPort": _PORT,
    "ContainerPort.hostPort": _PORT,
    "ContainerPort.protocol": {"enum": ["TCP", "UDP", "SCTP"]},
    "ContainerPort.name": _PORT_NAME,
    "NetworkPolicyPort.protocol": {"enum": ["TCP", "UDP", "SCTP"]},
    "NetworkPolicyPort.port": {**_PORT, **_PORT_NAME},
    "NetworkPolicyPort.endPort": _PORT,
    "IPBlock.cidr": {"pattern": _NETWORK, "description": "a network as address/bits, such as 10.0.0.0/8,"},
    "HTTPGetAction.scheme": {"enum": ["HTTP", "HTTPS"]},
    "HTTPGetAction.port": {**_PORT, **_PORT_NAME},
    "TCPSocketAction.port": {**_PORT, **_PORT_NAME},
    **{
        f"Probe.{field}": _PERIOD
        for field in ("periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold")
    },
    "EnvVar.name": {
        "pattern": "^[-._a-zA-Z][-._a-zA-Z0-9]*$",
        "description": "the name of an environment variable (letters, digits and underscores, no digit first)",
    },
    "VolumeMount.mountPath": {
        "pattern": r"^(/([^/.:][^/:]*|\.[^/.:][^/:]*|\.\.[^/:]+))+/?$",
        "description": "an absolute folder below / and without .. or a colon in it",
    },
    "VolumeMount.subPath": {"pattern": r"^[^/].*$|^$", "description": "a path relative to the volume's root"},
    "VolumeMount.mountPropagation": {"enum": ["None", "HostToContainer", "Bidirectional"]},
    "VolumeMount.name": _SHORT_NAME,
    "Volume.name": _SHORT_NAME,
    "HostAlias.ip": _ADDRESS,
    "PodDNSConfig.nameservers": {"maxItems": 3},
    "EnvFromSource.prefix": {
        "pattern": "^([A-Za-z_][A-Za-z0-9_]*)?$",
        "description": "the beginning of a variable's name (letters, digits and underscores, no digit first)",
    },
    "PodResourceClaim.name": _SHORT_NAME,
    **{f"PodResourceClaim.resourceClaim{end}": _NAME for end in ("Name", "TemplateName")},
    "HostPathVolumeSource.path": {
        "pattern": rf"^/$|^(/{_SEGMENT})+/?$",
        "description": "an absolute path of the node, without .. in it,",
    },
    "NFSVolumeSource.path": {"pattern": "^/", "description": "an absolute folder of the server"},
    **{f"{kind}.path": _RELATIVE for kind in ("KeyToPath", "DownwardAPIVolumeFile", "ServiceAccountTokenProjection")},
    "ServiceAccountTokenProjection.expirationSeconds": {"minimum": 600, "maximum": 4294967296},
    "ObjectFieldSelector.fieldPath": {
        "pattern": r"^(metadata\.(name|namespace|uid)|metadata\.(labels|annotations)(\['[^']+'\])?"
        r"|spec\.(nodeName|serviceAccountName)|status\.(hostIPs?|podIPs?))$",
        "description": "a field of the pod, such as metadata.name or status.podIP,",
    },
    "ResourceFieldSelector.resource": {
        "pattern": r"^(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*[KMG]i)$",
        "description": "a resource such as limits.memory",
    },
    "HostPathVolumeSource.type": {
        "enum": ["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"]
    },
    "EmptyDirVolumeSource.medium": {
        "pattern": "^(Memory|HugePages(-[0-9]+[KMG]i)?)?$",
        "description": "Memory, HugePages-2Mi or nothing",
    },
    # Without a pattern for names of Secrets: Helm repeats what does not match one, and it may be a credential.
    **{f"{kind}.name": _NAME for kind in ("ConfigMapVolumeSource", "ConfigMapProjection")},
    "PersistentVolumeClaimVolumeSource.claimName": _NAME,
    **{
        f"{source}.defaultMode": _MODE
        for source in (
            "SecretVolumeSource",
            "ConfigMapVolumeSource",
            "DownwardAPIVolumeSource",
            "ProjectedVolumeSource",
        )
    },
    "KeyToPath.mode": _MODE,
    "NodeSelectorRequirement.operator": {"enum": [*_OPERATORS, "Gt", "Lt"]},
    "LabelSelectorRequirement.operator": {"enum": _OPERATORS},
    "WeightedPodAffinityTerm.weight": {"minimum": 1, "maximum": 100},
    "PreferredSchedulingTerm.weight": {"minimum": 1, "maximum": 100},
    "NodeSelector.nodeSelectorTerms": {"minItems": 1},
    "PodAffinityTerm.topologyKey": {"minLength": 1, **_LABEL_KEY},
    "TopologySpreadConstraint.topologyKey": {"minLength": 1, **_LABEL_KEY},
    "TopologySpreadConstraint.maxSkew": _PERIOD,
    "TopologySpreadConstraint.minDomains": _PERIOD,
    "TopologySpreadConstraint.whenUnsatisfiable": {"enum": ["DoNotSchedule", "ScheduleAnyway"]},
    "TopologySpreadConstraint.nodeAffinityPolicy": {"enum": ["Honor", "Ignore"]},
    "TopologySpreadConstraint.nodeTaintsPolicy": {"enum": ["Honor", "Ignore"]},
    "Toleration.operator": {"enum": ["Exists", "Equal", "Lt", "Gt"]},
    "Toleration.effect": {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute", ""]},
    **{
        f"{context}.{field}": _USER
        for context in ("SecurityContext", "PodSecurityContext")
        for field in ("runAsUser", "runAsGroup")
    },
    "PodSecurityContext.fsGroup": _USER,
    "PodSecurityContext.fsGroupChangePolicy": {"enum": ["OnRootMismatch", "Always"]},
    # Unmasked is for pods with a user namespace of their own, which the chart's are not.
    "SecurityContext.procMount": {"enum": ["Default"]},
    "SeccompProfile.type": {"enum": ["RuntimeDefault", "Unconfined", "Localhost"]},
    "AppArmorProfile.type": {"enum": ["RuntimeDefault", "Unconfined", "Localhost"]},
    "Capability": {
        "pattern": "^([ABD-Z][A-Z_]*|CH[A-Z_]*)$",
        "description": "a capability in capital letters and without CAP_, such as IPC_LOCK,",
    },
    "MetricSpec.type": {"enum": ["Resource", "Pods", "Object", "External", "ContainerResource"]},
    "MetricTarget.type": {"enum": ["Utilization", "Value", "AverageValue"]},
}
# values.yaml has null for these: as the preset needs it.
NULLABLE = ("PodSecurityContext", "SecurityContext")
# Where no text stands for nothing, or where a field with a default needs to be said.
REQUIRED = {
    "Container": ["name", "image"],
    "IPBlock": ["cidr"],
    "PodDNSConfigOption": ["name"],
    "SecretVolumeSource": ["secretName"],
    **{kind: ["name"] for kind in ("ConfigMapVolumeSource", "ConfigMapProjection", "SecretProjection")},
    **{kind: ["name"] for kind in ("ConfigMapEnvSource", "SecretEnvSource")},
    **{kind: ["key", "name"] for kind in ("ConfigMapKeySelector", "SecretKeySelector")},
}
# Fields that were there before a cluster used them by default.
SINCE = {"LifecycleHandler.sleep": "1.30", "Container.restartPolicy": "1.29"}
# Type -> fields of which it takes exactly one, or at most one.
EXACTLY_ONE = {
    "Probe": ["exec", "grpc", "httpGet", "tcpSocket"],
    "LifecycleHandler": ["exec", "httpGet", "sleep", "tcpSocket"],
    "EnvFromSource": ["configMapRef", "secretRef"],
    "PodResourceClaim": ["resourceClaimName", "resourceClaimTemplateName"],
    "VolumeProjection": [
        *("clusterTrustBundle", "configMap", "downwardAPI", "podCertificate"),
        *("secret", "serviceAccountToken"),
    ],
}
AT_MOST_ONE = {"VolumeMount": ["subPath", "subPathExpr"]}
# Type -> (field, the other field, with which of its values it goes, does it have to be there with these?).
GOES_WITH: dict[str, list[tuple[str, str, list[Any], bool]]] = {
    "SeccompProfile": [("localhostProfile", "type", ["Localhost"], True)],
    "AppArmorProfile": [("localhostProfile", "type", ["Localhost"], True)],
    "NodeSelectorRequirement": [("values", "operator", ["In", "NotIn", "Gt", "Lt"], True)],
    "LabelSelectorRequirement": [("values", "operator", ["In", "NotIn"], True)],
    "TopologySpreadConstraint": [("minDomains", "whenUnsatisfiable", ["DoNotSchedule"], False)],
    "VolumeMount": [("recursiveReadOnly", "readOnly", [True], False)],
    "MetricSpec": [
        (f"{kind[0].lower()}{kind[1:]}", "type", [kind], True)
        for kind in ("Resource", "ContainerResource", "Pods", "Object", "External")
    ],
    "MetricTarget": [
        ("averageUtilization", "type", ["Utilization"], True),
        ("averageValue", "type", ["AverageValue"], True),
        ("value", "type", ["Value"], True),
    ],
}
EMPTY = [None, "", [], {}, False, 0]
# Type -> rules that no list of fields can say.
FURTHER: dict[str, list[dict[str, Any]]] = {
    "NodeSelectorRequirement": [
        {
            "if": {"required": ["operator"], "properties": {"operator": {"enum": ["Gt", "Lt"]}}},
            "then": {"properties": {"values": {"maxItems": 1, "items": {"pattern": "^-?[0-9]+$"}}}},
        }
    ],
    "NetworkPolicyPort": [
        {
            "if": {"required": ["endPort"]},
            "then": {"required": ["port"], "properties": {"port": {"type": "integer"}}},
        }
    ],
    "PodsMetricSource": [{"properties": {"target": {"properties": {"type": {"enum": ["AverageValue"]}}}}}],
}


def kubernetes_types() -> str:
    """The file's text: one type per line, each with its fields, closed against fields that there are not."""
    definitions = kubernetes_definitions(NEWEST)
    types: dict[str, Any] = {}
    todo = list(ROOTS)
    while todo:
        full = todo.pop()
        name = full.rsplit(".", 1)[1]
        if name not in types:
            types[name] = {"type": "object"} if name in OPEN else _type(name, definitions[full], todo)
    types["Capability"] = {"type": "string", **PROSE["Capability"]}
    for field in ("add", "drop"):
        types["Capabilities"]["properties"][field]["items"] = {"$ref": "#/definitions/Capability"}
    types["IPBlock"]["properties"]["except"]["items"] = {"type": "string", **PROSE["IPBlock.cidr"]}
    types["PodDNSConfig"]["properties"]["nameservers"]["items"] = {"type": "string", **_ADDRESS}
    types["HostAlias"]["properties"]["hostnames"]["items"] = {"type": "string", **_DNS_NAME}
    for field in ("limits", "requests"):
        amounts = types["ResourceRequirements"]["properties"][field]
        amounts["patternProperties"] = {_RESOURCE: amounts["additionalProperties"]}
        amounts["additionalProperties"] = False
    for name in NULLABLE:
        types[name]["type"] = ["object", "null"]
    lines = [f"  {json.dumps(name)}: {json.dumps(types[name], sort_keys=True)}" for name in sorted(types)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def fields_since() -> dict[tuple[str, str], str]:
    """(type, field) -> the version since which it is there, of those that the oldest version lacks."""
    made = json.loads(kubernetes_types())
    older = [kubernetes_definitions(version) for version in VERSIONS]
    found: dict[tuple[str, str], str] = {}
    for full, definition in kubernetes_definitions(NEWEST).items():
        name = full.rsplit(".", 1)[1]
        if name not in made or name in OPEN or full not in older[0]:
            continue
        for field in definition.get("properties", {}):
            fields = [each.get(full, {}).get("properties", {}) for each in older]
            first = next(version for version, known in zip(VERSIONS, fields, strict=True) if field in known)
            since = SINCE.get(f"{name}.{field}", first)
            if since != VERSIONS[0]:
                found[name, field] = since
    return found


def _type(name: str, definition: dict[str, Any], todo: list[str]) -> dict[str, Any]:
    if "properties" not in definition:
        return {**_field(name, definition, todo), **PROSE.get(name, {})}
    fields = {
        field: {**_field(name, schema, todo), **PROSE.get(f"{name}.{field}", {})}
        for field, schema in definition["properties"].items()
    }
    for field, schema in fields.items():
        if "enum" in schema and "null" in schema.get("type", []):
            fields[field] = {**schema, "enum": [*schema["enum"], None]}
    required = REQUIRED.get(name, definition.get("required", []))
    for field in required:
        if isinstance(fields[field].get("type"), list):
            fields[field]["type"] = [kind for kind in fields[field]["type"] if kind != "null"]
    made = {"title": name, "type": "object", "additionalProperties": False, "properties": fields}
    if rules := _rules(name):
        made["allOf"] = rules
    return {**made, "required": required} if required else made


def _rules(name: str) -> list[dict[str, Any]]:
    """Return the rules that hold between the fields of a type."""
    rules: list[dict[str, Any]] = []
    if name in EXACTLY_ONE:
        rules.append({"oneOf": [{"required": [field]} for field in EXACTLY_ONE[name]]})
    if name in AT_MOST_ONE:
        rules.append({"not": {"required": AT_MOST_ONE[name]}})
    for field, by, values, is_demanded in GOES_WITH.get(name, []):
        chosen = {"required": [by], "properties": {by: {"enum": values}}}
        given = {"required": [field], "properties": {field: {"not": {"enum": EMPTY}}}}
        rules.append({"if": given, "then": chosen})
        if is_demanded:
            rules.append({"if": chosen, "then": given})
    return [*rules, *FURTHER.get(name, [])]


def _field(name: str, schema: dict[str, Any], todo: list[str]) -> dict[str, Any]:
    """Return the field's type and bounds, without prose."""
    if "$ref" in schema:
        full = schema["$ref"].rsplit("/", 1)[1]
        if full.endswith("IntOrString"):
            return {"type": ["integer", "string"]}
        todo.append(full)
        return {"$ref": f"#/definitions/{full.rsplit('.', 1)[1]}"}
    if "oneOf" in schema:
        return {"type": ["string", "number"]}
    kept: dict[str, Any] = {"type": schema["type"]} if "type" in schema else {}
    if schema.get("format") in ("int32", "int64"):
        kept["maximum"] = 2147483647 if schema["format"] == "int32" else 9007199254740991
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            kept[inner] = _field(name, schema[inner], todo)
    return kept
