"""Rules of ways into the cluster, out of it and to the metrics: Service, Ingress, route, peers, monitors. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any

from spillway_ctl.check.chart_facts import facts
from spillway_ctl.check.finding import Finding, number, quoted
from spillway_ctl.check.group import Release
from spillway_settings.values.gateway import NODE_PORTS, GatewayService

_ADDRESS = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+")
# Annotations by which controllers learn that the gateway speaks TLS.
_SPEAKS_TLS = re.compile(
    r"(?i)backend-?(protocol|ssl|tls|config)|app-?protocol|serversscheme|serverstransport|server-ssl|secure-backend"
    r"|passthrough"
)
# Annotations by which controllers cut a path's beginning off.
_REWRITES = re.compile(r"(?i)rewrite|strip|regex|middleware|configuration-snippet")
# Type of a filter of HTTPRoute -> its only other field.
_ROUTE_FILTERS = {
    "RequestHeaderModifier": "requestHeaderModifier",
    "ResponseHeaderModifier": "responseHeaderModifier",
    "RequestMirror": "requestMirror",
    "URLRewrite": "urlRewrite",
    "ExtensionRef": "extensionRef",
    "CORS": "cors",
    "ExternalAuth": "externalAuth",
}
_NEEDED_BY_ACTION = {
    "replace": ("targetLabel",),
    "hashmod": ("targetLabel", "modulus"),
    "lowercase": ("targetLabel", "sourceLabels"),
    "uppercase": ("targetLabel", "sourceLabels"),
    "keepequal": ("targetLabel", "sourceLabels"),
    "dropequal": ("targetLabel", "sourceLabels"),
    "labeldrop": ("regex",),
    "labelkeep": ("regex",),
    "labelmap": ("regex",),
}


def route_findings(release: Release) -> Iterator[Finding]:
    yield from _service(release)
    yield from _ingress(release)
    yield from _http_route(release)
    yield from _policies(release)
    yield from _monitoring(release)
    domain = release.values.cluster_domain
    if domain.startswith("svc."):
        yield Finding(
            "clusterDomain",
            f"{quoted(domain)} begins with svc., which names of Services have before it",
            f"write {domain.removeprefix('svc.')}",
        )
    secret = release.values.gateway.tls.secret
    if secret.name and secret.certificate_key == secret.private_key_key:
        yield Finding(
            "gateway.tls.secret",
            f"certificateKey and privateKeyKey are both {secret.certificate_key}",
            "name the entry of each, e.g. tls.crt and tls.key",
        )


def _service(release: Release) -> Iterator[Finding]:
    service = release.values.gateway.service
    if service.type == "ClusterIP":
        published: dict[str, object] = {
            "nodePort": service.node_port,
            "externalTrafficPolicy": service.external_traffic_policy,
        }
        for key, value in published.items():
            if value:
                yield Finding(
                    f"gateway.service.{key}",
                    f"{value} needs type: NodePort or LoadBalancer; it is ClusterIP",
                    "set that type, or remove it",
                )
    yield from _node_port(service)
    balanced: dict[str, str] = {
        "loadBalancerClass": service.load_balancer_class,
        "loadBalancerSourceRanges": ", ".join(service.load_balancer_source_ranges),
    }
    for setting, text in balanced.items() if service.type != "LoadBalancer" else ():
        if text:
            yield Finding(
                f"gateway.service.{setting}",
                f"{text} needs type: LoadBalancer; it is {service.type}",
                "set that type, or remove it",
            )
    families = service.ip_families
    if len(families) > 1 and service.ip_family_policy not in ("PreferDualStack", "RequireDualStack"):
        yield Finding(
            "gateway.service.ipFamilies",
            f"{', '.join(families)} given, but ipFamilyPolicy: {number(service.ip_family_policy)} has one",
            "remove one, or set PreferDualStack",
        )


def _node_port(service: GatewayService) -> Iterator[Finding]:
    low, high = NODE_PORTS
    if service.node_port is not None and not low <= service.node_port <= high:
        yield Finding(
            "gateway.service.nodePort",
            f"{service.node_port} given, but Kubernetes has {low} to {high} for these, unless its API server was given "
            "another service-node-port-range",
            f"choose one of {low} to {high}, or null for any",
            is_note=True,
        )


def _ingress(release: Release) -> Iterator[Finding]:
    gateway, ingress = release.values.gateway, release.values.gateway.ingress
    if not ingress.enabled:
        return
    rules = [(ingress.host, ingress.path)] if ingress.host or not ingress.hosts else []
    rules += [(each.host, each.path or "/") for each in ingress.hosts]
    seen: set[tuple[str, str]] = set()
    for host, path in rules:
        if (host, path) in seen:
            yield Finding("gateway.ingress", f"{host}{path} is there twice", "remove one")
        seen.add((host, path))
        if ingress.path_type == "Exact" and path.endswith("/"):
            yield Finding(
                "gateway.ingress.pathType",
                f"Exact given with path {path}, at which the gateway has nothing: every request would be 404",
                "set Prefix",
            )
        if not re.match(r"/(v1(/|$)|$)", path) and not any(_REWRITES.search(key) for key in ingress.annotations):
            yield Finding(
                "gateway.ingress.path" if path == ingress.path else "gateway.ingress.hosts",
                f"{path} given, but the gateway serves /v1 and cuts nothing off, so that every request is 404",
                "write /, or have your controller cut it off, as by nginx.ingress.kubernetes.io/rewrite-target",
                is_note=True,
            )
        if _ADDRESS.fullmatch(host):
            yield Finding(
                "gateway.ingress",
                f"{host} is an address, and an Ingress takes names alone",
                "write a DNS name, or leave host empty for all",
            )
    if ingress.class_name and "kubernetes.io/ingress.class" in ingress.annotations:
        yield Finding(
            "gateway.ingress.annotations",
            f"kubernetes.io/ingress.class given beside className: {ingress.class_name}, and Kubernetes takes one of "
            "them",
            "remove the annotation",
        )
    annotations = {**ingress.annotations, **gateway.service.annotations}
    if gateway.tls.secret.name and not any(_SPEAKS_TLS.search(key) for key in annotations):
        yield Finding(
            "gateway.tls.secret.name",
            f"{gateway.tls.secret.name}, but the Ingress would speak plain HTTP to the gateway, and every request fail",
            "set your controller's annotation, such as gateway.ingress.annotations: "
            "{nginx.ingress.kubernetes.io/backend-protocol: HTTPS}, or remove gateway.tls, so that TLS ends at the "
            "Ingress "
            "(gateway.ingress.tlsSecret)",
        )
    hosts = [host for host, _ in rules]
    for index, certificate in enumerate(ingress.tls):
        for host in certificate.hosts or ():
            if host not in hosts:
                yield Finding(
                    f"gateway.ingress.tls[{index}].hosts",
                    f"{host} is no host of this Ingress",
                    "add it to gateway.ingress.hosts, or correct it",
                )


def _http_route(release: Release) -> Iterator[Finding]:
    gateway, route = release.values.gateway, release.values.gateway.http_route
    if route.enabled and not route.parent_refs:
        yield Finding(
            "gateway.httpRoute.parentRefs",
            "is empty",
            "name the Gateway that the route attaches to, e.g. [{name: public}]",
        )
    if route.enabled and gateway.tls.secret.name:
        yield Finding(
            "gateway.tls.secret.name",
            f"{gateway.tls.secret.name}, but a route speaks plain HTTP to the gateway unless a BackendTLSPolicy of its "
            "Service says otherwise",
            "add that policy by extraObjects, or remove gateway.tls, so that TLS ends at the Gateway",
            is_note=True,
        )
    for index, host in enumerate(route.hostnames):
        if _ADDRESS.fullmatch(host):
            yield Finding(
                f"gateway.httpRoute.hostnames[{index}]",
                f"{host} is an address, and a route takes names alone",
                "write a DNS name, or none for all",
            )
    for index, given in enumerate(route.filters):
        yield from _route_filter(f"gateway.httpRoute.filters[{index}]", given)
    seconds, longest = route.request_timeout_seconds, gateway.timeouts.plain_seconds
    if route.enabled and 0 < seconds < longest:
        yield Finding(
            "gateway.httpRoute.requestTimeoutSeconds",
            f"{seconds} ends answers that gateway.timeouts.plainSeconds: {number(longest)} still waits for",
            "set the first to 0 (no bound) or raise it, or lower the second",
        )


def _route_filter(at: str, given: dict[str, Any]) -> Iterator[Finding]:
    kind, bodies = given["type"], [key for key in given if key != "type"]
    body = _ROUTE_FILTERS.get(kind)
    if kind == "RequestRedirect":
        yield Finding(
            f"{at}.type",
            "RequestRedirect given, but this route leads to the gateway, and a route that redirects leads nowhere else",
            "remove it, and make that HTTPRoute an entry of extraObjects",
        )
    elif body is None:
        *most, last = _ROUTE_FILTERS
        meant = [each for each in _ROUTE_FILTERS if each.lower() == str(kind).lower()]
        yield Finding(
            f"{at}.type",
            f"{quoted(kind)} given, {', '.join(most)} or {last} needed",
            f"write {meant[0] if meant else 'one of these'}",
        )
    elif bodies != [body]:
        yield Finding(
            at,
            f"{' and '.join(bodies) or 'nothing'} given beside type: {kind}, {body} needed",
            f"write {{type: {kind}, {body}: ...}}",
        )


def _policies(release: Release) -> Iterator[Finding]:
    policy = release.values.network_policy
    peers: dict[str, list[dict[str, Any]]] = {
        "gatewayFrom": policy.gateway_from,
        "engineFrom": policy.engine_from,
        "prometheusFrom": policy.prometheus_from,
    }
    for key, rules in (("engineEgress", policy.engine_egress), ("gatewayEgress", policy.gateway_egress)):
        for index, rule in enumerate(rules):
            peers[f"{key}[{index}].to"] = rule.to or []
            for place, port in enumerate(rule.ports or ()):
                if port.get("endPort") and port["endPort"] < int(port.get("port") or 0):
                    yield Finding(
                        f"networkPolicy.{key}[{index}].ports[{place}].endPort",
                        f"{port['endPort']} given, at least port: {port['port']} needed",
                        "raise it",
                    )
    for at, listed in peers.items():
        for index, peer in enumerate(listed):
            if not peer:
                yield Finding(
                    f"networkPolicy.{at}[{index}]",
                    "an empty peer given",
                    "name podSelector, namespaceSelector or ipBlock, or {podSelector: {}} for every pod here",
                )
            elif peer.get("ipBlock"):
                yield from _block(f"networkPolicy.{at}[{index}].ipBlock", peer["ipBlock"])
            if peer.get("ipBlock") and len(peer) > 1:
                yield Finding(
                    f"networkPolicy.{at}[{index}]",
                    "ipBlock stands alone in a peer",
                    "make the selectors another entry",
                )


def _block(at: str, block: dict[str, Any]) -> Iterator[Finding]:
    whole = ip_network(block["cidr"], strict=False)
    for index, text in enumerate(block.get("except") or ()):
        part = ip_network(text, strict=False)
        if part.version != whole.version or part == whole or not part.subnet_of(whole):  # type: ignore[arg-type]
            yield Finding(
                f"{at}.except[{index}]", f"{text} is no part of cidr: {block['cidr']}", "write a smaller network in it"
            )


def _monitoring(release: Release) -> Iterator[Finding]:
    monitoring, policy = release.values.monitoring, release.values.network_policy
    if monitoring.pod_monitor.enabled and policy.enabled and not policy.prometheus_from:
        yield Finding(
            "monitoring.podMonitor.enabled",
            "true, but networkPolicy.prometheusFrom is empty, so that no Prometheus reaches the engines' metrics",
            "name its pods there, or set networkPolicy.enabled: false",
        )
    if monitoring.alerts.enabled and not monitoring.service_monitor.enabled:
        yield Finding(
            "monitoring.alerts.enabled",
            "true, but serviceMonitor.enabled is false, so that Prometheus has no series of the gateway under the name "
            "that alerts select by, and SpillwayGatewayDown would never stop firing",
            "set monitoring.serviceMonitor.enabled: true (podMonitor too, for alerts about engines), or "
            "alerts.enabled: "
            "false",
        )
    late, longest = monitoring.alerts.first_byte_seconds, release.values.gateway.timeouts.first_byte_seconds
    if monitoring.alerts.enabled and late >= longest:
        yield Finding(
            "monitoring.alerts.firstByteSeconds",
            f"{number(late)} given, but a request without a first byte ends after gateway.timeouts.firstByteSeconds: "
            f"{number(longest)}, so that the alert would never fire",
            "lower it",
            is_note=True,
        )
    alerts = [rule["alert"] for rule in facts("alerts.yaml")]
    for index, name in enumerate(monitoring.alerts.disabled):
        if name not in alerts:
            near = difflib.get_close_matches(name, alerts, n=1)
            yield Finding(
                f"monitoring.alerts.disabled[{index}]",
                f"{quoted(name)} is no alert of the chart, so that nothing would be left out",
                f"did you mean {near[0]}?" if near else f"write one of {', '.join(alerts)}",
                is_note=True,
            )
    monitors = (("podMonitor", monitoring.pod_monitor), ("serviceMonitor", monitoring.service_monitor))
    for name, monitor in monitors:
        for kind, rules in (("relabelings", monitor.relabelings), ("metricRelabelings", monitor.metric_relabelings)):
            for index, rule in enumerate(rules):
                yield from _relabeling(f"monitoring.{name}.{kind}[{index}]", rule, monitoring.alerts.enabled)


def _relabeling(at: str, rule: Any, alerts: bool) -> Iterator[Finding]:
    given = {
        "sourceLabels": rule.source_labels,
        "targetLabel": rule.target_label,
        "regex": rule.regex,
        "replacement": rule.replacement,
        "separator": rule.separator,
        "modulus": rule.modulus,
    }
    action = str(rule.action or "replace").lower()
    for field in _NEEDED_BY_ACTION.get(action, ()):
        if not given[field]:
            yield Finding(
                f"{at}.{field}",
                f"nothing given, and action: {action} needs it, or the operator refuses the whole monitor",
                "add it",
            )
    takes_names = action in ("labeldrop", "labelkeep")
    for field in ("sourceLabels", "targetLabel", "replacement", "separator", "modulus") if takes_names else ():
        if given[field]:
            yield Finding(
                f"{at}.{field}",
                f"given, but action: {action} takes regex alone, which it holds against labels' names",
                "remove it, or set action: drop or keep",
            )
    expression = rule.regex or ""
    try:
        keeps_job = re.fullmatch(f"(?:{expression})", "job") is not None
    except re.error:
        yield Finding(f"{at}.regex", f"{quoted(expression)} is no regular expression (RE2)", "correct it")
        return
    if alerts and (rule.target_label == "job" or (action == "labelkeep" and not keeps_job)):
        yield Finding(
            at,
            f"action: {action} changes the label job, which the alerts select by",
            "leave job as it is, or set monitoring.alerts.enabled: false",
        )
    if alerts and action == "labeldrop" and keeps_job:
        yield Finding(
            f"{at}.regex",
            f"{quoted(expression)} drops the label job, which the alerts select by",
            "leave it out, or set monitoring.alerts.enabled: false",
        )
