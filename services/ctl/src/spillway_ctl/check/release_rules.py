"""Rules between groups, and of names that all objects bear: served names, folders, labels, Secrets, objects. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Container, Iterator
from typing import Any

from spillway_ctl.check.chart_facts import schema
from spillway_ctl.check.engine_rules import volume_names
from spillway_ctl.check.finding import Finding, number, quoted, shown
from spillway_ctl.check.group import Release
from spillway_ctl.check.role_rules import role_findings
from spillway_ctl.check.shared_rules import repeated, variables
from spillway_settings.values.offload import tier_types

_SELECTED = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
    "app.kubernetes.io/part-of",
    "spillway/engine",
    "spillway/vllm",
)
_OWN_LABELS = (*_SELECTED, "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart")
_OWN_ANNOTATIONS = ("checksum/config", "spillway/secrets-revision", "kubectl.kubernetes.io/default-container")
_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.:]*[a-z0-9])?")
_KEY_PREFIX = re.compile(r"^(sk|pk|rk|gh[pousr]|hf|glpat|xox[abprs])[-_]")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INSTALLED = (
    ("gateway.httpRoute.enabled", "gateway.networking.k8s.io/v1/HTTPRoute", "the Gateway API"),
    ("gateway.picker.enabled", "inference.networking.k8s.io/v1/InferencePool", "Gateway API's Inference Extension"),
    ("monitoring.podMonitor.enabled", "monitoring.coreos.com/v1/PodMonitor", "the Prometheus operator"),
    ("monitoring.serviceMonitor.enabled", "monitoring.coreos.com/v1/ServiceMonitor", "the Prometheus operator"),
    ("monitoring.alerts.enabled", "monitoring.coreos.com/v1/PrometheusRule", "the Prometheus operator"),
)


def release_findings(release: Release) -> Iterator[Finding]:
    yield from secret_names({key: value for key, value in release.tree.items() if key != "extraObjects"}, "")
    yield from _served_names(release)
    yield from role_findings(release)
    yield from _shared_folders(release)
    yield from _redis(release)
    yield from _installed(release)
    yield from _object_names(release)
    yield from _labels(release)
    yield from _extra_objects(release)
    for _ in repeated(secret.name for secret in release.values.image.pull_secrets):
        yield Finding("image.pullSecrets", "one Secret is listed twice", "remove one")


def _served_names(release: Release) -> Iterator[Finding]:
    served: dict[str, tuple[str, str]] = {}  # name -> group, model
    with_roles = {group.served_name for group in release.groups if group.engine.role != "both"}
    for group in release.groups:
        model, lora = group.engine.model, group.engine.lora
        names = [group.served_name, *model.aliases]
        names += [adapter.name for adapter in lora.adapters] + [alias.name for alias in lora.aliases]
        for name in names:
            path, model_name = served.get(name, (group.path, group.served_name))
            one_model = model_name == group.served_name in with_roles and path != group.path
            if name in served and not one_model:
                yield Finding(
                    group.path,
                    f"the name {quoted(name)} is already served by {path}",
                    "give one of them another model.servedName, alias or name of an adapter",
                )
            served[name] = group.path, group.served_name


def _shared_folders(release: Release) -> Iterator[Finding]:
    folders: dict[tuple[str, str], tuple[str, str, Any]] = {}
    for group in release.groups:
        nvme = group.engine.offload.shared_tier.nvme
        if not group.uses_nvme or nvme.volume.type not in ("hostPath", "existingClaim"):
            continue
        at, kind = f"{group.path}.offload.sharedTier.nvme", str(nvme.volume.type)
        folder = (kind, nvme.volume.host_path.rstrip("/") if kind == "hostPath" else nvme.volume.claim_name)
        if folder not in folders:
            folders[folder] = (group.path, nvme.mode, nvme.max_bytes)
            continue
        other, mode, most = folders[folder]
        where = " ".join(folder)
        if nvme.mode != mode and "auto" not in (nvme.mode, mode):
            yield Finding(
                f"{at}.mode",
                f"{nvme.mode} given, but {other} stores as {mode} in the same folder ({where})",
                "set one mode for both, or give each a folder of its own",
            )
        if nvme.max_bytes != most:
            yield Finding(
                f"{at}.maxBytes",
                f"{number(nvme.max_bytes)} given, but {other} has {number(most)} for the same folder ({where}), and "
                "the "
                "bound is of all together",
                "give both the same, or each a folder of its own",
            )


def _redis(release: Release) -> Iterator[Finding]:
    redis = release.values.redis
    tiers = [group.engine.offload.shared_tier for group in release.groups if group.engine.offload.enabled]
    if redis.enabled and not any("redis" in tier_types(tier) and not tier.redis.url for tier in tiers):
        yield Finding(
            "redis.enabled",
            "true, but no engine uses it",
            "set engine.offload.sharedTier.type: redis with an empty url, or redis.enabled: false",
        )
    yield from volume_names("redis", redis.extra_volumes, ("config", "scratch"))
    own = {"VALKEY_PASSWORD": "name the Secret in redis.existingSecret"}
    yield from variables("redis.extraEnvVars", redis.extra_env_vars, own)


def _installed(release: Release) -> Iterator[Finding]:
    for setting, kind, what in _INSTALLED:
        section, key, _ = setting.split(".")
        if release.tree[section][key]["enabled"] and kind not in release.cluster.kinds:
            yield Finding(
                setting, f"this cluster has no {kind}", f"install {what} first (with helm template: -a {kind})"
            )


def _object_names(release: Release) -> Iterator[Finding]:
    full, given = release.full_name, release.cluster.release
    if not re.match("[a-z]", full):
        yield Finding(
            "fullnameOverride",
            f"the names of all objects begin with {quoted(full)}, and a Service's has to begin with a letter",
            f"set fullnameOverride, e.g. spillway-{given.replace('.', '-')}",
        )
    elif re.fullmatch("[-a-z0-9]*", full) is None:
        yield Finding(
            "fullnameOverride",
            f"the names of all objects begin with {quoted(full)}, and a Service's may hold small letters, digits and "
            "dashes alone, no dot",
            f"set fullnameOverride, e.g. {re.sub('[^-a-z0-9]', '-', full)}",
        )


def _labels(release: Release) -> Iterator[Finding]:
    values = release.values
    for key in _OWN_LABELS:
        if key in values.common_labels:
            yield Finding("commonLabels", f"{key} is set by the chart", "remove it")
    labels = {
        "gateway.service.labels": values.gateway.service.labels,
        "monitoring.podMonitor.labels": values.monitoring.pod_monitor.labels,
        "monitoring.serviceMonitor.labels": values.monitoring.service_monitor.labels,
        "monitoring.alerts.labels": values.monitoring.alerts.labels,
        "monitoring.dashboards.labels": values.monitoring.dashboards.labels,
    }
    labels |= {f"{path}.podLabels": section.pod_labels for path, section in release.sections()}
    for path, given in labels.items():
        for key in given:
            if key in _SELECTED or key.startswith("app.kubernetes.io/"):
                yield Finding(path, f"{key} is set by the chart", "remove it")
            elif key in values.common_labels:
                yield Finding(path, f"{key} is in commonLabels too", "give it once")
    for path, section in release.sections():
        for key in _OWN_ANNOTATIONS:
            if key in section.pod_annotations:
                yield Finding(f"{path}.podAnnotations", f"{key} is set by the chart", "remove it")
    for key in values.common_annotations:
        if key.startswith("helm.sh/hook") or key == "helm.sh/resource-policy":
            yield Finding(
                "commonAnnotations",
                f"{key} would make Helm treat every object otherwise than as a part of the release",
                "remove it",
            )


def _extra_objects(release: Release) -> Iterator[Finding]:
    chart_names = {release.full_name, release.name("gateway"), release.name("redis")}
    chart_names |= {name for group in release.groups for name in (group.name, group.headless)}
    for kind, name in repeated((each["kind"], each["metadata"]["name"]) for each in release.values.extra_objects):
        yield Finding("extraObjects", f"{kind} {name} is there twice", "rename or remove one")
    for index, extra in enumerate(release.values.extra_objects):
        at, kind, metadata = f"extraObjects[{index}]", extra["kind"], extra["metadata"]
        name = metadata["name"]
        if "{{" not in name and _OBJECT_NAME.fullmatch(name) is None:
            yield Finding(
                f"{at}.metadata.name",
                f"{quoted(name)} given, the name of an object (small letters, digits, dashes and dots) needed",
                "correct it",
            )
        if name in chart_names:
            yield Finding(f"{at}.metadata.name", f"{name} is a name of the chart's own objects", "choose another")
        yield from _templates(extra, at, frozenset(_DECLARED.findall(json.dumps(extra, default=str))))
        plain = {"metadata.labels": metadata.get("labels"), "metadata.annotations": metadata.get("annotations")}
        plain |= {part: extra.get(part) for part in _PLAIN.get(kind, ())}
        for part, entries in plain.items():
            for key, value in (entries or {}).items():
                if not isinstance(value, str):
                    hidden = "secret" if kind == "Secret" else ""
                    yield Finding(
                        f"{at}.{part}.{key}", f"{shown(value, hidden)} given, text needed", "write it in quotes"
                    )
                elif kind == "Secret" and part == "data" and "{{" not in value and not _is_base64(value):
                    yield Finding(
                        f"{at}.data.{key}",
                        f"text of {len(value)} characters given that is no base64",
                        "write it below stringData, as it is",
                    )


def _templates(value: Any, at: str, declared: Container[str]) -> Iterator[Finding]:
    """Find texts of an object, which together are one template, that Helm would refuse or render as nothing. declared:
    the template's variables.
    """
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _templates(entry, f"{at}.{key}" if isinstance(value, dict) else f"{at}[{key}]", declared)
        return
    if not isinstance(value, str):
        return
    if "{{" in _ACTION.sub("", value):
        yield Finding(
            at, "Helm reads what begins with {{, and no }} ends it", "close it, or write {{ `{{` }} for the text"
        )
    for action in _ACTION.findall(value):
        bare = _LITERAL.sub("", action)
        variable = re.search(r"\$[A-Za-z_]\w*", bare)
        if variable and variable[0] not in declared:
            yield Finding(
                at,
                f"Helm reads {action}, and {variable[0]} is no variable there",
                f"if another program reads it, write {{{{ `{action}` }}}}",
            )
        setting = re.search(r"\.Values\.(\w+)", bare)
        if setting and setting[1] not in schema()["properties"]:
            yield Finding(
                at,
                f"{setting[0]} given, which is no setting, so that Helm finds nothing there",
                f'correct it, or write (index .Values "x-{setting[1]}") and give x-{setting[1]}',
                is_note=True,
            )
        unknown = re.search(r"(?<![\w)])\.(Release|Chart|Template)\.(\w+)", bare)
        if unknown and unknown[2] not in _OF_HELM[unknown[1]]:
            yield Finding(
                at,
                f"{unknown[0]} given, which Helm does not have",
                f"write one of {', '.join(f'.{unknown[1]}.{name}' for name in _OF_HELM[unknown[1]])}",
            )


_TEXT = r"`[^`]*`|\"(?:\\.|[^\"\\])*\""
_COMMENT = r"/\*.*?\*/"
_ACTION = re.compile(rf"\{{\{{(?:-\s)?{_COMMENT}(?:\s-)?\}}\}}|\{{\{{(?:{_TEXT}|[^`\"])*?\}}\}}", re.DOTALL)
_LITERAL = re.compile(rf"{_COMMENT}|{_TEXT}", re.DOTALL)
_DECLARED = re.compile(r"(\$[A-Za-z_]\w*)\s*(?::=|,)")
_OF_HELM = {
    "Release": ("Name", "Namespace", "Service", "Revision", "IsInstall", "IsUpgrade"),
    "Chart": (
        "Name",
        "Version",
        "AppVersion",
        "Type",
        "KubeVersion",
        "Description",
        "Home",
        "Icon",
        "Keywords",
        "Annotations",
        "APIVersion",
        "Condition",
        "Tags",
        "IsRoot",
        "Sources",
        "Maintainers",
        "Dependencies",
        "Deprecated",
    ),
    "Template": ("Name", "BasePath"),
}
_PLAIN = {"ConfigMap": ("data",), "Secret": ("data", "stringData")}


def _is_base64(value: str) -> bool:
    try:
        base64.b64decode(re.sub(r"\s", "", value), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def secret_names(value: Any, path: str) -> Iterator[Finding]:
    """Every reference to a Secret holds a name.

    A credential that was pasted there would lie in the objects for all to read, so it is refused and not repeated.
    """
    for key, inner in value.items():
        at = f"{path}.{key}" if path else key
        is_reference = key.endswith(("ecret", "ecretKeyRef", "ecretRef"))
        if isinstance(inner, dict):
            if is_reference and "name" in inner:
                yield from _secret_name(f"{at}.name", inner["name"])
                for entry, name in inner.items():
                    if isinstance(name, str) and entry.lower().endswith("key"):
                        yield from _secret_entry(f"{at}.{entry}", name)
            yield from secret_names(inner, at)
        elif isinstance(inner, list):
            for index, entry in enumerate(inner):
                if isinstance(entry, dict):
                    if key == "pullSecrets":
                        yield from _secret_name(f"{at}[{index}].name", entry.get("name"))
                    yield from secret_names(entry, f"{at}[{index}]")
        elif isinstance(inner, str) and key.endswith("ecretKey"):
            yield from _secret_entry(at, inner)
        elif isinstance(inner, str) and (is_reference or key.endswith("ecretName")):
            yield from _secret_name(at, inner)


def _secret_name(path: str, given: Any) -> Iterator[Finding]:
    name = str(given or "")
    if name and name != name.strip() and _SECRET_NAME.fullmatch(name.strip()):
        yield _with_blank(path, name)
    elif name and (len(name) > 253 or _SECRET_NAME.fullmatch(name) is None):
        yield Finding(
            path,
            f"what is given ({len(name)} characters) is no name of a Secret: small letters, digits, dashes and dots",
            "a credential goes into a Secret (kubectl create secret generic NAME --from-literal=KEY=...), and the "
            "name of "
            "that Secret goes here",
        )
    else:
        yield from _looks_like_a_key(path, name)


def _with_blank(path: str, name: str) -> Finding:
    return Finding(
        path,
        f"text of {len(name)} characters given with a blank or a line break at its end, which is no part of a name",
        "remove it (in YAML, write the name on the line of its key, without |)",
    )


def _secret_entry(path: str, name: str) -> Iterator[Finding]:
    if name != name.strip():
        yield _with_blank(path, name)
    elif re.search(r"[^-._a-zA-Z0-9]", name) or (not name and not path.endswith("usernameKey")):
        yield Finding(
            path,
            f"text of {len(name)} characters given, which entry of the Secret it is (letters, digits, dashes, dots and "
            "underscores) needed",
            "correct it",
        )
    else:
        yield from _looks_like_a_key(path, name)


def _looks_like_a_key(path: str, name: str) -> Iterator[Finding]:
    """A key of small letters and digits is a valid name of a Secret, and of an entry of it."""
    run = max(re.findall("[A-Za-z0-9]+", name), key=len, default="")
    digits = sum(letter.isdigit() for letter in run)
    is_hex = len(run) >= 32 and digits > 0 and re.fullmatch("[0-9A-Fa-f]+", run) is not None
    is_long = len(run) >= 30 or (len(run) >= 16 and digits >= 3)
    has_prefix = is_long and _KEY_PREFIX.match(name) is not None
    if is_hex or has_prefix or _UUID.fullmatch(name) or (len(run) >= 40 and digits >= 6):
        yield Finding(
            path,
            f"what is given ({len(name)} characters) looks like a key itself, which would lie in the objects for all "
            "to "
            "read",
            "make another key, put it into a Secret (kubectl create secret generic NAME --from-literal=KEY=...), and "
            "write its name here",
        )
