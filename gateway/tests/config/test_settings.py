from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.settings import load_config, parse_config
from spillway_gateway.errors import ConfigError

ENGINE = {"name": "e0", "url": "http://127.0.0.1:8100"}


def document(**sections: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", "engines": [ENGINE]}], **sections}


def roles_of(*roles: str, events: bool = True) -> list[dict[str, Any]]:
    """`models` with one whose engines have these roles."""
    events_of = {"kvEvents": "tcp://h:2"} if events else {}
    engines = [
        {"name": f"e{at}", "url": f"http://h:{at + 1}", "role": role, **events_of} for at, role in enumerate(roles)
    ]
    return [{"name": "m", "engines": engines}]


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "decode"), ("prefill", "both", "decode")])
def test_engines_may_have_roles_that_make_up_whole_requests(roles: tuple[str, ...]) -> None:
    config = parse_config(document(models=roles_of(*roles), disaggregation={"mode": False}))
    assert [engine.role for engine in config.models[0].engines] == list(roles)
    assert config.disaggregation.is_off, "YAML reads a plain off as false"


def test_minimal_file_gets_the_defaults() -> None:
    config = parse_config(document())

    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 8000)
    assert config.models[0].engines[0].kv_events is None


def test_camel_case_keys_reach_their_fields() -> None:
    config = parse_config(document(timeouts={"firstByteSeconds": 7}, limits={"bodyBytesMax": 10}))

    assert config.timeouts.first_byte_seconds == 7.0
    assert config.limits.body_bytes_max == 10


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"timeout": {}}, "did you mean 'timeouts'"),
        ({"timeouts": {"firstByteSecond": 1}}, "did you mean 'firstByteSeconds'"),
        (
            {"timeouts": {"connectSeconds": "2"}},
            "timeouts.connectSeconds: '2' given, a number above 0 and at most",
        ),
        ({"timeouts": {"connectSeconds": 0}}, "timeouts.connectSeconds"),
        ({"timeouts": {"connectSeconds": float("nan")}}, "timeouts.connectSeconds"),
        ({"health": {"timeoutsBeforeDown": True}}, "health.timeoutsBeforeDown"),
        ({"listen": {"port": 70000}}, "listen.port"),
        ({"listen": {"opsPort": 8000}}, "listen.opsPort: 8000 is listen.port too"),
        ({"listen": {"opsHost": "0.0.0.0"}}, "listen.opsHost: set without listen.opsPort"),
        ({"listen": {"tls": {"certFile": "c"}}}, "listen.tls.keyFile: missing"),
        ({"disaggregation": {"mode": "sometimes"}}, "disaggregation.mode: 'sometimes' given, auto, always or off"),
        ({"disaggregation": {"mode": True}}, "disaggregation.mode: True given, auto, always or off needed"),
        ({"models": roles_of("prefill", "prefill")}, "'m' has prefill engines alone; give one of them the role decode"),
        ({"models": roles_of("decode")}, "'m' has decode engines alone; give one of them the role prefill or both"),
        ({"models": roles_of("prefill", "decode", events=False)}, "engine 'e0' of 'm': no kvEvents given"),
        ({"models": roles_of("reader")}, "models[0].engines[0].role: 'reader' given, both, prefill or decode needed"),
        ({"auth": {"unsaltedRoutes": "maybe"}}, "auth.unsaltedRoutes: 'maybe' given"),
        ({"auth": {"keysFile": "k"}}, "auth: one of keysFile and saltSecretFile given"),
        ({"auth": {"saltSecretFile": "s"}}, "auth: one of keysFile and saltSecretFile given"),
        ({"auth": {"engineKeyFile": "e"}}, "auth.engineKeyFile: set without auth.keysFile"),
        ({"auth": {"saltSecretFile": "s", "engineKeyFile": "e"}}, "one of keysFile and saltSecretFile given"),
        ({"auth": {"unsaltedRoutes": "allow"}}, "auth.unsaltedRoutes: allow given without auth.keysFile"),
        ({"auth": {"sharedLimits": {"url": "redis://h"}}}, "auth.sharedLimits: set without auth.keysFile"),
        ({"auth": {"keysFile": "k", "saltSecretFile": "k"}}, "auth.saltSecretFile: k is auth.keysFile too"),
        (
            {"auth": {"keysFile": "k", "saltSecretFile": "s", "engineKeyFile": "s"}},
            "auth.engineKeyFile: s is auth.saltSecretFile too",
        ),
        ({"audit": {"waitingLinesMax": 0}}, "audit.waitingLinesMax"),
        ({"reload": {"periodSeconds": -1}}, "reload.periodSeconds"),
        ({"log": {"level": "loud"}}, "log.level"),
        ({"routing": {"boundedLoadFactor": 0.5}}, "routing.boundedLoadFactor"),
        ({"shutdown": {"drainDelaySeconds": -1}}, "shutdown.drainDelaySeconds"),
        ({"models": []}, "models: empty"),
        ({"models": [{"name": "m", "engines": []}]}, "has no engine"),
        ({"models": [{"engines": [ENGINE]}]}, "models[0].name: missing"),
        ({"models": [{"name": "m", "engines": [ENGINE, ENGINE]}]}, "two engines are named 'e0'"),
        ({"models": [{"name": "m", "aliases": ["m"], "engines": [ENGINE]}]}, "used twice"),
        ({"models": [{"name": "m", "aliases": ["a"], "adapters": ["a"], "engines": [ENGINE]}]}, "'a' is used twice"),
        ({"models": [{"name": "m", "engines": [{"name": "e", "url": "127.0.0.1:80"}]}]}, "http://HOST:PORT"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "kvReplay": "tcp://h:1"}]}]}, "kvReplay is set without"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "dataParallelRanks": 0}]}]}, "dataParallelRanks"),
        (
            {"models": [{"name": "m", "engines": [{**ENGINE, "dataParallelRanks": 3, "workers": ["w"]}]}]},
            "workers has 1 hosts, so that dataParallelRanks 3 are on 2 pods, which does not divide them",
        ),
        (
            {"models": [{"name": "m", "engines": [{**ENGINE, "dataParallelRanks": 2}, {**ENGINE, "name": "e0/dp1"}]}]},
            "two engines are named 'e0/dp1'",
        ),
        (
            {"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "ipc://e", "dataParallelRanks": 2}]}]},
            "kvEvents 'ipc://e' given with dataParallelRanks 2, tcp://HOST:PORT needed",
        ),
        (
            {"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "tcp://h:65535", "dataParallelRanks": 2}]}]},
            "would use 65536; set it to 65534 or less",
        ),
        (
            {
                "models": [
                    {
                        "name": "m",
                        "discovery": {
                            "dns": {"name": "e", "port": 1, "kvEventsPort": 8200, "kvReplayPort": 8203}
                            | {"dataParallelRanks": 4}
                        },
                    }
                ]
            },
            "kvReplayPort 8203 is within the 4 ports of kvEventsPort from 8200 on",
        ),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "h:1"}]}]}, "kvEvents"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "tcp://h"}]}]}, "kvEvents"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "tcp://h:0"}]}]}, "kvEvents"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "tcp://h:99999"}]}]}, "kvEvents"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "kvEvents": "ipc://"}]}]}, "kvEvents"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "url": "http://h:1 "}]}]}, "url"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "url": "http://h :1"}]}]}, "url"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "url": "http://h:1/a\tb"}]}]}, "url"),
        ({"connections": {"headSeconds": 0}}, "connections.headSeconds"),
        ({"limits": {"bodyBytesMax": 2**30}}, "limits.bodiesBytesMax"),
        ({"models": [{"name": "m", "engines": [{**ENGINE, "name": "a b"}]}]}, "visible ASCII"),
    ],
)
def test_refusals_name_the_setting(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(document(**sections))

    assert message in str(refused.value)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("models: [")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(broken)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(json_like, json_like)
def test_any_document_is_parsed_or_refused(value: object, section: object) -> None:
    for candidate in (value, document(timeouts=section), {"models": value}, {"models": [value]}):
        try:
            parse_config(candidate)
        except ConfigError as error:
            assert str(error)


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    engine = "models: [{name: m, engines: [{name: e, url: 'http://h:1'}]}]\n"
    file.write_text(engine + "limits:\n  attemptsMax: 2\n  attemptsMax: 3\n")
    with pytest.raises(ConfigError, match=r"'attemptsMax' is there twice.* line 4"):
        load_config(file)
    file.write_text(engine + "x: &base {attemptsMax: 2}\nlimits: {<<: *base, attemptsMax: 3}\n")
    with pytest.raises(ConfigError, match="x: unknown setting"):
        load_config(file)  # a merged key may be set again


def test_a_file_that_would_take_minutes_to_read_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    with path.open("wb") as file:
        file.truncate(100_000_000)

    with pytest.raises(ConfigError, match="100000000 bytes given, at most 1048576 read"):
        load_config(path)
