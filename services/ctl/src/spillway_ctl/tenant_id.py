"""`spillway tier tenant`: under which id a tenant's blocks lie in a shared tier."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from spillway_ctl.errors import CommandError
from spillway_ctl.frame_filter import tenant_of_salt
from spillway_ctl.run import OK
from spillway_ctl.store_choice import secret_in
from spillway_settings.tenant_salts import SECRET_BYTES_MIN, tenant_salt


def print_tenant(given: argparse.Namespace) -> int:
    """The 16 digits that `--tenant` of the other commands takes. Raises CommandError, which shows no salt."""
    print(tenant_of_salt(_salt(given)).hex())
    return OK


def _salt(given: argparse.Namespace) -> str:
    if given.salt_env is not None and given.salt_secret_file is not None:
        raise CommandError(
            f"--salt-secret-file {given.salt_secret_file}: is read with --name alone; remove it, or give --name"
        )
    salt = secret_in("--salt-env", given.salt_env, "the salt")
    if salt is not None:
        return salt
    if given.salt_secret_file is None:
        raise CommandError(
            "--name needs --salt-secret-file, the file with the gateway's salt secret; - reads it from stdin"
        )
    return tenant_salt(_secret(given.salt_secret_file), given.name, None)


def _secret(path: Path) -> bytes:
    """Read the secret as the gateway does, without blanks at both ends."""
    try:
        secret = (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).strip()
    except OSError as error:
        raise CommandError(f"--salt-secret-file {path}: cannot be read ({error.strerror}); give a file") from error
    if len(secret) < SECRET_BYTES_MIN:
        raise CommandError(
            f"--salt-secret-file {path}: {len(secret)} bytes given, at least {SECRET_BYTES_MIN} needed; give the whole "
            "content of gateway.auth.saltSecret, decoded"
        )
    return secret
