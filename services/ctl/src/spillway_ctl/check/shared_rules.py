"""Rules that hold at several settings. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

from spillway_ctl.check.finding import Finding, number, quoted
from spillway_settings.values.kinds import DNS_LABEL, LABEL_VALUE
from spillway_settings.values.pods import EnvironmentVariable, PodSettings
from spillway_settings.values.release import NetworkPolicy

_Name = TypeVar("_Name")

_OWN_POD = re.compile(r"[a-z-]+://(?:localhost|127\.[0-9.]+|0\.0\.0\.0|\[::1?\])(?=[:/,]|$)")
# A host, perhaps with a port.
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
HOST = rf"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:{_PORT})?"
_DATABASES = 16  # Redis's default
_SYSTEM_FOLDER = re.compile(
    r"(/(?:dev(?!/shm/)|proc|sys|etc|usr(?!/local/)|bin|sbin|lib|lib64|boot|run|var/run"
    r"|var/lib/(?:kubelet|containerd|docker|etcd)))(?:/|$)"
)
_NO_FILES = ("/dev", "/proc", "/sys")
_LABEL_KEY = re.compile(rf"({DNS_LABEL}(\.{DNS_LABEL})*/)?{LABEL_VALUE}")


class Scaling(Protocol):
    @property
    def enabled(self) -> bool: ...

    @property
    def min_replicas(self) -> int: ...

    @property
    def max_replicas(self) -> int: ...


class Login(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def username_key(self) -> str: ...


def replica_bounds(at: str, scaling: Scaling) -> Iterator[Finding]:
    if scaling.enabled and scaling.min_replicas > scaling.max_replicas:
        yield Finding(
            at,
            f"minReplicas: {scaling.min_replicas} is more than maxReplicas: {scaling.max_replicas}",
            "lower the first or raise the second",
        )


def behavior(path: str, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Bounds that Kubernetes has for HPA behaviour, and its published types have not."""
    for direction in ("scaleUp", "scaleDown"):
        at, rules = f"{path}.{direction}", given.get(direction) or {}
        window = rules.get("stabilizationWindowSeconds")
        bounds = [] if window is None else [(f"{at}.stabilizationWindowSeconds", window, 0, 3600)]
        if (select := rules.get("selectPolicy")) not in (None, "Max", "Min", "Disabled"):
            yield Finding(
                f"{at}.selectPolicy", f"{quoted(select)} given, Max, Min or Disabled needed", "write one of these"
            )
        policies = rules.get("policies")
        if policies is not None and not policies:
            yield Finding(f"{at}.policies", "is empty, and Kubernetes needs a policy", "remove it, or write one")
        for index, policy in enumerate(policies or ()):
            here = f"{at}.policies[{index}]"
            if policy.get("type") not in ("Pods", "Percent"):
                yield Finding(
                    f"{here}.type", f"{quoted(policy.get('type'))} given, Pods or Percent needed", "write one of these"
                )
            bounds.append((f"{here}.value", policy.get("value"), 1, 2_147_483_647))
            bounds.append((f"{here}.periodSeconds", policy.get("periodSeconds"), 1, 1800))
        for setting, value, low, high in bounds:
            if value is not None and not low <= value <= high:
                yield Finding(
                    setting, f"{number(value)} given, a whole number from {low} to {high} needed", "correct it"
                )


def repeated(names: Iterable[_Name]) -> Iterator[_Name]:
    """Each name that equals one before it."""
    seen = set()
    for name in names:
        if name in seen:
            yield name
        seen.add(name)


def variables(at: str, given: Iterable[EnvironmentVariable], own: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that extraEnvVars may not hold. own: variables that the chart sets, with what to do in place of
    each."""
    names = [variable.name for variable in given]
    for name in names:
        if name in own:
            yield Finding(at, f"{name} is set by the chart", own[name])
    for name in repeated(names):
        yield Finding(at, f"{name} is listed twice", "remove one")


def containers(path: str, section: PodSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (setting, container) for each container that the values add to the pods of the section at `path`."""
    for kind, listed in (("initContainers", section.init_containers), ("sidecars", section.sidecars)):
        for index, container in enumerate(listed):
            yield f"{path}.{kind}[{index}]", container


def not_above(
    at: str, request: tuple[str, Any], limit: tuple[str, Any], measured: Callable[[Any], Any]
) -> Iterator[Finding]:
    """A request that is more than its limit; each is its name and its value, or None."""
    (asked, low), (bound, high) = request, limit
    if low is not None and high is not None and measured(low) > measured(high):
        problem = f"{asked} {number(low)} is more than {bound} {number(high)}"
        yield Finding(at, problem, "lower the first or raise the second")


def closed_way(
    policy: NetworkPolicy, egress: Literal["engineEgress", "gatewayEgress"], to: str, or_else: str = ""
) -> Iterator[Finding]:
    """Find an address that pods need and that networkPolicy does not list."""
    open_ways = policy.engine_egress if egress == "engineEgress" else policy.gateway_egress
    if policy.enabled and policy.restrict_egress and not open_ways:
        yield Finding(
            "networkPolicy.restrictEgress",
            f"true closes the way to {to}",
            f"list its address in networkPolicy.{egress}{or_else}",
        )


def login(at: str, secret: Login) -> Iterator[Finding]:
    if secret.username_key and not secret.name:
        yield Finding(
            f"{at}.usernameKey",
            f"{secret.username_key}, but existingSecret.name is empty",
            "name the Secret, or remove usernameKey",
        )


def system_folder(at: str, host_path: str, remedy: str, *, is_read: bool = False) -> Iterator[Finding]:
    """A folder of the node that is not for files of pods. is_read: pods write nothing to it."""
    if system := _SYSTEM_FOLDER.match(host_path):
        yield Finding(
            at,
            f"{host_path} lies in {system[1]} of the node, which is the system's own",
            remedy,
            is_note=is_read and system[1] not in _NO_FILES,
        )


def is_own_pod(url: str) -> bool:
    """Whether the address is that of whoever reads it."""
    return _OWN_POD.match(url) is not None


def many_databases(at: str, url: str) -> Iterator[Finding]:
    found = re.search(r"(?:/|[?&]db=)([0-9]+)$", url)
    if found is not None and int(found[1]) >= _DATABASES:
        yield Finding(
            at,
            f"database {found[1]} given, but a Redis has 0 to {_DATABASES - 1} unless its setting databases says more",
            "write one of these, or raise databases there",
            is_note=True,
        )


def labels_of(value: Any, path: str) -> Iterator[Finding]:
    """Labels that selectors and tolerations of Kubernetes name: their keys and values have a form."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from labels_of(entry, f"{path}[{index}]")
    if not isinstance(value, Mapping):
        return
    selected = value.get("matchLabels") or {}
    named = [(f"{path}.{key}", value.get(key)) for key in ("key", "topologyKey")]
    named += [(f"{path}.matchLabels", key) for key in selected]
    for at, key in named:
        if key and _LABEL_KEY.fullmatch(str(key)) is None:
            yield Finding(
                at, f"{quoted(key)} given, a label's key, such as team or example.com/team, needed", "correct it"
            )
    texts = [(f"{path}.matchLabels.{key}", text) for key, text in selected.items()]
    if value.get("operator") in (None, "Equal", "In", "NotIn") and ("key" in value):
        texts += [(f"{path}.value", value.get("value"))]
        texts += [(f"{path}.values[{index}]", text) for index, text in enumerate(value.get("values") or ())]
    for at, text in texts:
        if text and re.fullmatch(LABEL_VALUE, str(text)) is None:
            yield Finding(
                at,
                f"{quoted(text)} given, a label's value (at most 63 letters, digits, dashes, dots and underscores) "
                "needed",
                "correct it",
            )
    for key, inner in value.items():
        if key != "matchLabels":
            yield from labels_of(inner, f"{path}.{key}")


def distinct_folders(at: str, mounts: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    for folder in repeated(mount["mountPath"].removesuffix("/") for mount in mounts):
        yield Finding(at, f"{folder} is given twice", "mount each volume at a folder of its own")


def propagation(at: str, mount: Mapping[str, Any], *, is_privileged: bool) -> Iterator[Finding]:
    if mount.get("mountPropagation") == "Bidirectional" and not is_privileged:
        yield Finding(
            at,
            f"mountPropagation: Bidirectional of {mount['name']} is for privileged containers alone",
            "set HostToContainer, or remove it",
        )
