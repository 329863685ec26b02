"""The command line of `spillway doctor`, and what it means."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from spillway_ctl.doctor import Patient
from spillway_ctl.errors import CommandError
from spillway_ctl.live.release import Release, release_of
from spillway_ctl.quantities import checked, parse_age_seconds
from spillway_ctl.readings import Questions
from spillway_ctl.store_choice import StoreChoice, choice_from_config, secret_in
from spillway_ctl.store_options import choice_of, with_store
from spillway_settings.values.gateway import Gateway
from spillway_settings.wire import STORE_TYPES

STACK = Path(".run")
_GATEWAY_PORT = Gateway().port  # of a configuration that names none

_DESCRIPTION = """\
What is wrong with a gateway, its engines and their shared tier, as each process says it, and what to change. One line
for each check: ok, warning, failed or not checked (with the reason).

Each engine is asked for two completions, the longer one of two blocks (--no-requests leaves them out). Measuring a tier
writes and reads 32 MiB, which do not stay.
"""
_EPILOG = """\
exit status:
  0    no check failed
  1    a check failed
  2    the command or a setting is wrong

examples:
  spillway doctor                                          the stack of `make up`, in this folder
  spillway doctor --gateway http://127.0.0.1:8001 --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101
  helm test chat -n llm --logs                             a release: this with --release in the cluster
  spillway doctor --engine http://127.0.0.1:8100 --config /etc/spillway/engine.yaml     in an engine's pod
"""


def add_doctor(areas: Any) -> None:
    parser = areas.add_parser(
        "doctor",
        help="what is wrong with a running gateway, its engines and their tier",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--stack", type=Path, metavar="FOLDER", help="of `make up` (default: .run, if nothing else is named)"
    )
    parser.add_argument(
        "--release",
        metavar="FILE",
        help="what the chart wrote of a release; its chats, settings and tiers are tried too, as helm test does",
    )
    parser.add_argument("--gateway", metavar="URL", help="its operations port, or the clients' port if it has none")
    parser.add_argument(
        "--engine", metavar="URL", action="append", default=[], help="of one engine; default: those the gateway names"
    )
    parser.add_argument("--gateway-key-env", metavar="NAME", help="variable with an operator's key of the gateway")
    parser.add_argument("--engine-key-env", metavar="NAME", help="variable with the engines' key")
    parser.add_argument("--no-requests", action="store_true", help="ask no engine for a completion")
    parser.add_argument(
        "--window",
        metavar="AGE",
        type=checked(parse_age_seconds),
        default=5.0,
        help="over which counters are judged (default 5s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    with_store(parser)


def patient_of(given: argparse.Namespace) -> Patient:
    """Raises CommandError, SettingsError, ConfigError."""
    named = given.gateway is not None or given.engine
    if named and given.stack is not None:
        raise CommandError("--stack names gateway and engines itself; leave out --gateway and --engine, or --stack")
    for url in (*([given.gateway] if given.gateway is not None else []), *given.engine):
        if not url.startswith(("http://", "https://")):
            raise CommandError(f"{url}: not an address; write for example http://127.0.0.1:8001")
    tier = _tier(given)
    if named:
        return _patient(given.gateway, tuple(given.engine), tier)
    folder = (given.stack if given.stack is not None else STACK) / "config"
    try:
        listen = (yaml.safe_load((folder / "gateway.yaml").read_text(encoding="utf-8")) or {}).get("listen", {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise CommandError(
            f"{folder / 'gateway.yaml'}: cannot be read ({getattr(error, 'strerror', None) or error}); run it where "
            "`make up` ran, or give --gateway and --engine"
        ) from error
    gateway = f"http://{listen.get('host', '127.0.0.1')}:{listen.get('port', _GATEWAY_PORT)}"
    engine = folder / "engine-0.yaml"
    if tier is None and engine.exists():
        try:
            tier = choice_from_config(engine)
        except CommandError as none:
            tier = str(none)
    return _patient(gateway, (), tier)


def release_given(given: argparse.Namespace) -> Release:
    """Raises CommandError."""
    if given.gateway is not None or given.engine or given.stack is not None:
        raise CommandError("--release names gateway and engines itself; leave out --gateway, --engine and --stack")
    return release_of(given.release)


def questions_of(given: argparse.Namespace) -> Questions:
    """Raises CommandError."""
    return Questions(
        answer_seconds=given.timeout,
        window_seconds=given.window,
        gateway_key=secret_in("--gateway-key-env", given.gateway_key_env, "the key") or "",
        engine_key=secret_in("--engine-key-env", given.engine_key_env, "the key") or "",
        makes_requests=not given.no_requests,
    )


def _patient(gateway: str | None, engines: tuple[str, ...], tier: StoreChoice | str | None) -> Patient:
    if tier is None:
        return Patient(gateway, engines)
    return Patient(gateway, engines, no_tier=tier) if isinstance(tier, str) else Patient(gateway, engines, tier)


def _tier(given: argparse.Namespace) -> StoreChoice | str | None:
    """Return the tier to measure; None: none is named; text: why there is none to measure."""
    if given.config is None:
        named = any(getattr(given, store) is not None for store in STORE_TYPES)
        return choice_of(given) if named else None
    try:
        return choice_of(given)
    except CommandError as none:
        return str(none)
