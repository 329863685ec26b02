"""The command line of `spillway tier`, and what its filters mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from spillway_ctl.check.command_line import add_check
from spillway_ctl.doctor_options import add_doctor
from spillway_ctl.frame_filter import FrameFilter, parse_namespace_prefix, parse_tenant
from spillway_ctl.node_tier import add_node_tier
from spillway_ctl.plan_options import add_plan
from spillway_ctl.quantities import checked, parse_age_seconds, parse_rate
from spillway_ctl.store_options import with_store

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

_EXAMPLES = {
    "status": """\
examples:
  spillway tier status --nvme /var/lib/spillway/kv
  spillway tier status --config /etc/spillway/engine.yaml --json
  REDIS_PASSWORD=... spillway tier status --redis rediss://cache:6379/0 --password-env REDIS_PASSWORD
""",
    "ls": """\
examples:
  spillway tier ls --nvme /var/lib/spillway/kv --newer-than 1h --limit 20
  spillway tier ls --nvme /var/lib/spillway/kv --tenant default --json | jq -r .key
""",
    "verify": """\
examples:
  spillway tier verify --nvme /var/lib/spillway/kv
  spillway tier verify --redis redis-cluster://cache-0:6379 --namespace 3f2a --rate-limit none
  spillway tier verify --config /etc/spillway/engine.yaml --remove-damaged --json
""",
    "purge": """\
examples:
  spillway tier purge --nvme /var/lib/spillway/kv --older-than 7d --dry-run
  spillway tier purge --nvme /var/lib/spillway/kv --namespace 3f2a91c0 --yes
  spillway tier purge --s3 s3://kv/chat/ --s3-endpoint https://store:9000 --older-than 30d --dry-run
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
    areas = top.add_subparsers(dest="area", required=True, metavar="tier|check|plan|doctor|node-tier")
    add_check(areas)
    add_plan(areas)
    add_doctor(areas)
    add_node_tier(areas)
    tier = areas.add_parser(
        "tier",
        help="look into a shared tier, verify it, remove from it",
        description=DESCRIPTION,
        epilog=EXIT_STATUSES,
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
    return top


def filter_of(given: argparse.Namespace) -> FrameFilter:
    return FrameFilter(
        given.namespace or "",
        getattr(given, "tenant", None),
        getattr(given, "older_than", None),
        getattr(given, "newer_than", None),
    )


class _Parser(argparse.ArgumentParser):
    """Prints in one line what is wrong and which option shows help; help keeps its lines as they are written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"spillway: {message}; see {self.prog} --help\n")


Commands = argparse._SubParsersAction  # the type has no public name


def _add(commands: Commands[_Parser], name: str, purpose: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"{_EXAMPLES[name]}\n{EXIT_STATUSES}",
    )


def _with_filters(command: argparse.ArgumentParser, *, ages: bool = True) -> None:
    which = command.add_argument_group("which frames", "All that are given must hold.")
    which.add_argument(
        "--namespace", metavar="HEX", type=checked(parse_namespace_prefix), help="the first digits of a namespace"
    )
    if not ages:
        return
    which.add_argument(
        "--tenant", metavar="ID", type=checked(parse_tenant), help="16 hex digits, or default: without a cache salt"
    )
    age = "since its last use; in Redis and in a bucket since it was stored"
    which.add_argument("--older-than", metavar="AGE", type=checked(parse_age_seconds), help=f"30m, 12h, 7d, 2w {age}")
    which.add_argument("--newer-than", metavar="AGE", type=checked(parse_age_seconds), help="the same")


def _with_json(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--json", action="store_true", help=what)


def _status(commands: Commands[_Parser]) -> None:
    command = _add(commands, "status", "show namespaces, tenants, bytes, limit, and damage seen in headers")
    with_store(command)
    _with_filters(command, ages=False)
    _with_json(command, "one JSON document")


def _ls(commands: Commands[_Parser]) -> None:
    command = _add(commands, "ls", "list frames")
    with_store(command)
    _with_filters(command)
    command.add_argument("--limit", metavar="N", type=checked(_count), help="end after so many")
    _with_json(command, "one JSON object per line and frame")


def _verify(commands: Commands[_Parser]) -> None:
    command = _add(commands, "verify", "read every byte of every frame and compare checksums")
    with_store(command)
    _with_filters(command)
    command.add_argument("--remove-damaged", action="store_true", help="remove what is proven wrong, like an engine")
    command.add_argument(
        "--rate-limit",
        metavar="RATE",
        type=checked(parse_rate),
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
    with_store(command)
    _with_filters(command)
    command.add_argument("--all", action="store_true", help="without any filter: everything")
    command.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    command.add_argument("--yes", action="store_true", help="do not ask")
    _with_json(command, "one JSON document; needs --yes or --dry-run")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of frames; give 1 or more")
    return int(text)
