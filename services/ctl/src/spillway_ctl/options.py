"""The command line of `spillway tier`, and what it means."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from spillway_ctl.errors import CommandError
from spillway_ctl.frame_filter import FrameFilter, parse_namespace_prefix, parse_tenant
from spillway_ctl.plan_options import add_plan
from spillway_ctl.quantities import parse_age_seconds, parse_rate
from spillway_ctl.store_choice import NO_STORE, StoreChoice, choice_from_config

_Value = TypeVar("_Value")

DESCRIPTION = """\
Look into a shared tier, prove it whole, and remove from it, while engines use it.

  spillway tier status    namespaces, tenants, bytes, limit, damage seen in headers
  spillway tier ls        frame by frame
  spillway tier verify    read every byte and compare checksums
  spillway tier purge     remove by namespace, tenant and age
  spillway tier tenant    the tenant id of a cache salt, or of a tenant's name
"""

EXIT_STATUSES = """\
exit status:
  0    done
  1    verify found damage
  2    the command or a setting is wrong, or the tier does not answer
  3    purge was not confirmed
  130  interrupted; purge and verify report their progress, and the tier is intact
"""

_STORE_NOTE = """\
The tier is a directory, a Redis or Valkey URL, or the one in an engine's configuration file. A login comes from
environment variables or a file, never from the command line. It needs SCAN and reading; see docs/operations.md.
"""

_EXAMPLES = {
    "status": """\
examples:
  spillway tier status --nvme /var/lib/spillway
  spillway tier status --config /etc/spillway/engine.yaml --json
  REDIS_PASSWORD=... spillway tier status --redis rediss://cache:6379/0 --password-env REDIS_PASSWORD
""",
    "ls": """\
examples:
  spillway tier ls --nvme /var/lib/spillway --newer-than 1h --limit 20
  spillway tier ls --nvme /var/lib/spillway --tenant default --json | jq -r .key
""",
    "verify": """\
examples:
  spillway tier verify --nvme /var/lib/spillway
  spillway tier verify --redis redis-cluster://cache-0:6379 --namespace 3f2a --rate-limit none
  spillway tier verify --config /etc/spillway/engine.yaml --remove-damaged --json
""",
    "purge": """\
examples:
  spillway tier purge --nvme /var/lib/spillway --older-than 7d --dry-run
  spillway tier purge --nvme /var/lib/spillway --namespace 3f2a91c0 --yes
  spillway tier purge --redis redis://cache:6379/0 --tenant $(spillway tier tenant --salt-env SALT) --yes
""",
    "tenant": """\
examples:
  SALT=customer-7 spillway tier tenant --salt-env SALT
  kubectl get secret gateway-salt -o jsonpath='{.data.secret}' | base64 -d \\
    | spillway tier tenant --name search --salt-secret-file -
""",
}


def parser() -> argparse.ArgumentParser:
    """`spillway`, with everything below it."""
    top = _Parser(prog="spillway", description="The operator's command of Spillway.")
    areas = top.add_subparsers(dest="area", required=True, metavar="tier|plan")
    add_plan(areas)
    tier = areas.add_parser(
        "tier",
        help="look into a shared tier, verify it, remove from it",
        description=DESCRIPTION,
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = tier.add_subparsers(dest="command", required=True, metavar="status|ls|verify|purge|tenant")
    _status(commands)
    _ls(commands)
    _verify(commands)
    _purge(commands)
    tenant = _add(commands, "tenant", "print the tenant id of a cache salt, or of a tenant of the gateway by its name")
    whose = tenant.add_mutually_exclusive_group(required=True)
    whose.add_argument("--salt-env", metavar="NAME", help="the environment variable with the salt")
    whose.add_argument("--name", metavar="TENANT", help="as in the gateway's keys.yaml; needs --salt-secret-file")
    tenant.add_argument(
        "--salt-secret-file", metavar="FILE", type=Path, help="the gateway's auth.saltSecret; - for standard input"
    )
    tenant.add_argument(
        "--client-salt-env", metavar="NAME", help="with --name: the variable with the salt that the client itself sends"
    )
    return top


def filter_of(given: argparse.Namespace) -> FrameFilter:
    return FrameFilter(
        given.namespace or "",
        getattr(given, "tenant", None),
        getattr(given, "older_than", None),
        getattr(given, "newer_than", None),
    )


def choice_of(given: argparse.Namespace) -> StoreChoice:
    """Raises CommandError, SettingsError."""
    if given.config is not None:
        choice = choice_from_config(given.config)
    elif given.nvme is not None or given.redis is not None:
        choice = StoreChoice(nvme=given.nvme, redis=given.redis)
    else:
        raise CommandError(NO_STORE)
    login = {name: getattr(given, name) for name in _LOGIN if getattr(given, name) is not None}
    if login and choice.redis is None:
        raise CommandError(f"--{next(iter(login)).replace('_', '-')} is for Redis; this tier is a directory")
    if "password_env" in login or "password_file" in login:
        choice = replace(choice, password_env=None, password_file=None)
    key_file = getattr(given, "encryption_key_file", None)
    if key_file is not None:
        choice = replace(choice, encryption_key_file=key_file, encryption_key_env=None)
    return replace(choice, **login)


_LOGIN = {
    "username_env": ("NAME", "environment variable with the user"),
    "password_env": ("NAME", "environment variable with the password"),
    "password_file": ("FILE", "file with the password"),
    "tls_ca_file": ("FILE", "authorities to trust, where not the system's"),
    "tls_certificate_file": ("FILE", "this client's certificate, with --tls-key-file"),
    "tls_key_file": ("FILE", "its key"),
}


class _Parser(argparse.ArgumentParser):
    """Prints in one line what is wrong, and where help is."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"spillway: {message}; see {self.prog} --help\n")


Commands = argparse._SubParsersAction  # the type has no public name


def _add(commands: Commands[_Parser], name: str, purpose: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"{_EXAMPLES[name]}\n{EXIT_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _with_store(command: argparse.ArgumentParser) -> None:
    where = command.add_argument_group("tier", _STORE_NOTE)
    one = where.add_mutually_exclusive_group()
    one.add_argument("--nvme", metavar="DIR", type=Path, help="directory of an NVMe tier, of either layout")
    one.add_argument("--redis", metavar="URL", help="redis://, redis-sentinel:// or redis-cluster://, rediss for TLS")
    one.add_argument("--config", metavar="FILE", type=Path, help="engine.yaml: its offload.sharedTier is the tier")
    for name, (metavar, purpose) in _LOGIN.items():
        where.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=purpose)
    where.add_argument(
        "--timeout",
        metavar="AGE",
        type=_checked(parse_age_seconds),
        default=5.0,
        help="for one answer of a server (default 5s)",
    )


def _with_filters(command: argparse.ArgumentParser, *, ages: bool = True) -> None:
    which = command.add_argument_group("which frames", "All that are given must hold.")
    which.add_argument(
        "--namespace", metavar="HEX", type=_checked(parse_namespace_prefix), help="the first digits of a namespace"
    )
    if not ages:
        return
    which.add_argument(
        "--tenant", metavar="ID", type=_checked(parse_tenant), help="16 hex digits, or default: without a cache salt"
    )
    age = "since its last use; in Redis since it was stored"
    which.add_argument("--older-than", metavar="AGE", type=_checked(parse_age_seconds), help=f"30m, 12h, 7d, 2w {age}")
    which.add_argument("--newer-than", metavar="AGE", type=_checked(parse_age_seconds), help="the same")


def _with_json(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", action="store_true", help=what)


def _status(commands: Commands[_Parser]) -> None:
    command = _add(commands, "status", "show namespaces, tenants, bytes, limit, and damage seen in headers")
    _with_store(command)
    _with_filters(command, ages=False)
    _with_json(command, "one JSON document")


def _ls(commands: Commands[_Parser]) -> None:
    command = _add(commands, "ls", "list frames")
    _with_store(command)
    _with_filters(command)
    command.add_argument("--limit", metavar="N", type=_checked(_count), help="end after so many")
    _with_json(command, "one JSON object per line and frame")


def _verify(commands: Commands[_Parser]) -> None:
    command = _add(commands, "verify", "read every byte of every frame and compare checksums")
    _with_store(command)
    _with_filters(command)
    command.add_argument("--remove-damaged", action="store_true", help="remove what is proven wrong, like an engine")
    command.add_argument(
        "--rate-limit",
        metavar="RATE",
        type=_checked(parse_rate),
        default=parse_rate("200MiB/s"),
        help="bytes per second to read at most (default 200MiB/s; none: as fast as it goes)",
    )
    command.add_argument(
        "--encryption-key-file",
        metavar="FILE",
        type=Path,
        help="open the seals of encrypted frames too; without it, or a key in --config, their ciphertext is verified",
    )
    _with_json(command, "one JSON document")


def _purge(commands: Commands[_Parser]) -> None:
    command = _add(commands, "purge", "remove frames; engines compute again what they still need")
    _with_store(command)
    _with_filters(command)
    command.add_argument("--all", action="store_true", help="without any filter: everything")
    command.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    command.add_argument("--yes", action="store_true", help="do not ask")
    _with_json(command, "one JSON document; needs --yes or --dry-run")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of frames; give 1 or more")
    return int(text)


def _checked(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """argparse hides the message of a ValueError; this shows it."""

    def checked(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
