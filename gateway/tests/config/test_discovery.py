from __future__ import annotations

from typing import Any

import pytest

from spillway_gateway.config.discovery import nameserver
from spillway_gateway.config.settings import parse_config, shown_config
from spillway_gateway.errors import ConfigError

KUBERNETES = {"service": "spillway-engine-pods", "kvEventsPort": "kv-events", "kvReplayPort": 8300}
DNS = {"name": "engines.local", "port": 8100}


def document(discovery: Any, **model: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", "discovery": discovery, **model}]}


def test_names_and_numbers_of_ports_reach_their_fields_and_are_shown() -> None:
    config = parse_config(document({"kubernetes": KUBERNETES}))

    discovery = config.models[0].discovery
    assert discovery is not None and discovery.kubernetes is not None
    assert (discovery.kubernetes.port, discovery.kubernetes.kv_events_port) == ("http", "kv-events")
    assert discovery.kubernetes.kv_replay_port == 8300
    shown = shown_config(config)["models"][0]
    assert shown["engines"] == [] and shown["discovery"]["dns"] is None
    assert shown["discovery"]["kubernetes"]["namespaceFile"].endswith("serviceaccount/namespace")
    assert parse_config({"models": [{key: value for key, value in shown.items() if value is not None}]}) == config


def test_names_of_a_name_service_too() -> None:
    config = parse_config(document({"dns": {**DNS, "nameservers": ["10.0.0.1", "[fd00::1]:8600"]}}))

    discovery = config.models[0].discovery
    assert discovery is not None and discovery.dns is not None
    assert [nameserver(server) for server in discovery.dns.nameservers] == [("10.0.0.1", 53), ("fd00::1", 8600)]


@pytest.mark.parametrize(
    ("discovery", "message"),
    [
        ({}, "one of kubernetes and dns needed"),
        ({"dns": DNS, "kubernetes": KUBERNETES}, "one of kubernetes and dns needed"),
        ({"consul": {}}, "unknown setting"),
        ({"kubernetes": {}}, "models[0].discovery.kubernetes.service: missing"),
        ({"kubernetes": {"service": "a.b"}}, "kubernetes.service: 'a.b' given, the plain name"),
        ({"kubernetes": {**KUBERNETES, "namespace": "a/b"}}, "kubernetes.namespace"),
        ({"kubernetes": {**KUBERNETES, "role": "decode"}}, "kubernetes: has decode engines alone; give those of one"),
        (
            {"kubernetes": {**KUBERNETES, "role": "decode", "roleServices": {KUBERNETES["service"]: "prefill"}}},
            "is kubernetes.service too; set its role by `role`",
        ),
        (
            {"kubernetes": {"service": "s", "roleServices": {"p": "prefill"}}},
            "kubernetes.kvEventsPort: missing, but engines have roles",
        ),
        ({"kubernetes": {**KUBERNETES, "port": 0}}, "kubernetes.port: 0 given, a whole number from 1 to 65535 needed"),
        ({"kubernetes": {**KUBERNETES, "port": 1.5}}, "discovery.kubernetes.port: 1.5 given, a whole number"),
        ({"kubernetes": {**KUBERNETES, "port": "HTTP"}}, "kubernetes.port: 'HTTP' given, a port's name"),
        ({"kubernetes": {"service": "s", "kvReplayPort": 1}}, "kvReplayPort is set without kvEventsPort"),
        ({"kubernetes": {**KUBERNETES, "scheme": "grpc"}}, "kubernetes.scheme: 'grpc' given, http or https needed"),
        (
            {"kubernetes": {**KUBERNETES, "resyncSeconds": 0}},
            "kubernetes.resyncSeconds: 0 given, a finite number above 0 needed",
        ),
        ({"kubernetes": {**KUBERNETES, "apiServer": "host:1"}}, "kubernetes.apiServer: 'host:1' given, https://"),
        ({"dns": {**DNS, "port": 70_000}}, "dns.port: 70000 given"),
        ({"dns": {**DNS, "port": "http"}}, "discovery.dns.port: 'http' given, a whole number from 1 to 65535 needed"),
        ({"dns": {**DNS, "kvReplayPort": 1}}, "kvReplayPort is set without kvEventsPort"),
        ({"dns": {**DNS, "periodSeconds": float("inf")}}, "dns.periodSeconds: inf given"),
        (
            {"dns": {**DNS, "emptyAnswersBeforeRemoval": 0}},
            "dns.emptyAnswersBeforeRemoval: 0 given, a whole number of at least 1",
        ),
        ({"dns": {**DNS, "nameservers": ["resolver"]}}, "dns.nameservers: 'resolver' given, IP or IP:PORT needed"),
        ({"dns": {**DNS, "nameservers": ["10.0.0.1:0"]}}, "dns.nameservers: '10.0.0.1:0' given"),
    ],
)
def test_refusals_name_the_setting(discovery: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(document(discovery))

    assert message in str(refused.value)


def test_engines_are_listed_or_found_and_not_both() -> None:
    engines = [{"name": "e", "url": "http://h:1"}]
    with pytest.raises(ConfigError, match="has both engines and discovery; remove one"):
        parse_config(document({"dns": DNS}, engines=engines))
    with pytest.raises(ConfigError, match="or set 'discovery'"):
        parse_config(document(None))
