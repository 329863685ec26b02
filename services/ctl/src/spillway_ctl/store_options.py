"""Options that name a shared tier and its login, and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from spillway_ctl.errors import CommandError
from spillway_ctl.quantities import checked, parse_age_seconds
from spillway_ctl.store_choice import NO_STORE, StoreChoice, choice_from_config, place_of

_STORE_NOTE = """\
The tier is a directory, a Redis or Valkey URL, a bucket, or the one in an engine's configuration file. A login comes
from environment variables or a file, never from the command line: for Redis it needs SCAN and reading; for a bucket
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a workload identity, may list and read. See docs/operations.md.
"""
_LOGIN = {
    "username_env": ("NAME", "environment variable with the user"),
    "password_env": ("NAME", "environment variable with the password"),
    "password_file": ("FILE", "file with the password"),
    "tls_ca_file": ("FILE", "authorities to trust in place of the system's"),
    "tls_certificate_file": ("FILE", "this client's certificate, with --tls-key-file"),
    "tls_key_file": ("FILE", "its key"),
}


def with_store(command: argparse.ArgumentParser) -> None:
    where = command.add_argument_group("tier", _STORE_NOTE)
    one = where.add_mutually_exclusive_group()
    one.add_argument("--nvme", metavar="DIR", type=Path, help="directory of an NVMe tier, of either layout")
    one.add_argument("--redis", metavar="URL", help="redis://, redis-sentinel:// or redis-cluster://, rediss for TLS")
    one.add_argument("--s3", metavar="URL", help="s3://BUCKET/PREFIX/ of an object store")
    one.add_argument("--config", metavar="FILE", type=Path, help="engine.yaml: its offload.sharedTier is the tier")
    where.add_argument("--below", action="store_true", help="with --config: its offload.sharedTier.below instead")
    for name, (metavar, purpose) in _LOGIN.items():
        where.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=purpose)
    where.add_argument("--s3-endpoint", metavar="URL", help="https://host:port; default: AWS's own of the region")
    where.add_argument("--s3-region", metavar="REGION", help="default: us-east-1")
    where.add_argument(
        "--timeout",
        metavar="AGE",
        type=checked(parse_age_seconds),
        default=5.0,
        help="for one answer of a server (default 5s)",
    )


def choice_of(given: argparse.Namespace) -> StoreChoice:
    """Raises CommandError, SettingsError."""
    if given.config is not None:
        choice = choice_from_config(given.config, below=given.below)
    elif given.nvme is not None or given.redis is not None:
        choice = StoreChoice(nvme=given.nvme, redis=given.redis)
    elif given.s3 is not None:
        choice = StoreChoice(s3=place_of(given.s3, given.s3_endpoint, given.s3_region, given.tls_ca_file))
    else:
        raise CommandError(NO_STORE)
    if given.below and given.config is None:
        raise CommandError(
            "--below belongs to --config, which is not given: give --config engine.yaml, or leave out --below"
        )
    for option in ("s3_endpoint", "s3_region"):
        if getattr(given, option) is not None and given.s3 is None:
            raise CommandError(
                f"--{option.replace('_', '-')} belongs to --s3, which is not given: give --s3, or leave it out"
            )
    login = {name: getattr(given, name) for name in _LOGIN if getattr(given, name) is not None}
    if choice.s3 is not None:
        login.pop("tls_ca_file", None)  # in the place already
    if login and choice.redis is None:
        kind = "a directory" if choice.nvme is not None else "a bucket"
        raise CommandError(f"--{next(iter(login)).replace('_', '-')} is for Redis; this tier is {kind}: leave it out")
    if "password_env" in login or "password_file" in login:
        choice = replace(choice, password_env=None, password_file=None)
    key_file = getattr(given, "encryption_key_file", None)
    if key_file is not None:
        choice = replace(choice, encryption_key_file=key_file, encryption_key_env=None)
    return replace(choice, **login)
