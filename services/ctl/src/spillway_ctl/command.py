"""`spillway`: one command line in, one exit status out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from spillway_connector.errors import ConfigError, TierError
from spillway_connector.tiers.inspection import CheckPayload
from spillway_ctl.check.command_line import check
from spillway_ctl.doctor import doctor
from spillway_ctl.doctor_options import patient_of, questions_of, release_given
from spillway_ctl.errors import CommandError
from spillway_ctl.interruption import Interruption
from spillway_ctl.listing import listing
from spillway_ctl.live.release import check_release
from spillway_ctl.node_tier import node_tier
from spillway_ctl.options import filter_of, parser
from spillway_ctl.plan import plan
from spillway_ctl.plan_options import apart_of, planned_engines, rates_of
from spillway_ctl.purge import asker, purge
from spillway_ctl.run import INTERRUPTED, OK, WRONG, Run
from spillway_ctl.status import status
from spillway_ctl.store import Store
from spillway_ctl.store_choice import StoreChoice
from spillway_ctl.store_options import choice_of
from spillway_ctl.tenant_id import print_tenant
from spillway_ctl.verify import verify
from spillway_engine.errors import SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; see options.EXIT_STATUSES."""
    given = parser().parse_args(arguments)
    interruption = Interruption()
    try:
        with interruption.watching():
            if given.area == "check":
                return check(given)
            if given.area == "node-tier":
                return node_tier(given, interruption)
            if given.area == "plan":
                engines = planned_engines(given)
                wanted = apart_of(given, engines)
                return plan(engines, rates_of(given), given.prompt_tokens, as_json=given.json, apart=wanted)
            if given.area == "doctor" and given.release is not None:
                return check_release(release_given(given), as_json=given.json)
            if given.area == "doctor":
                return doctor(patient_of(given), questions_of(given), as_json=given.json)
            return print_tenant(given) if given.command == "tenant" else _on_store(given, interruption)
    except (CommandError, ConfigError, SettingsError, TierError) as error:
        print(f"spillway: {error}", file=sys.stderr, flush=True)
        return WRONG
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED


def _on_store(given: argparse.Namespace, interruption: Interruption) -> int:
    chosen = filter_of(given)
    if given.command == "purge":
        if chosen.is_everything and not given.all:
            raise CommandError(
                "purge without a filter removes everything; give --namespace, --tenant or an age, or --all"
            )
        if given.all and not chosen.is_everything:
            raise CommandError("--all contradicts the filters; leave one of the two out")
        if given.json and not (given.yes or given.dry_run):
            raise CommandError("purge --json cannot ask; add --yes or --dry-run")
    choice = choice_of(given)
    store = choice.open(given.timeout)
    run = Run(store, chosen, store.now_s(), interruption, as_json=given.json)
    try:
        match given.command:
            case "status":
                return status(run)
            case "ls":
                return listing(run, given.limit)
            case "verify":
                check_payload, opens = _seals(choice, store)
                return verify(
                    run,
                    remove_damaged=given.remove_damaged,
                    bytes_per_second=given.rate_limit,
                    check_payload=check_payload,
                    opens=opens,
                )
        return purge(run, dry_run=given.dry_run, yes=given.yes, ask=asker())
    finally:
        store.close()


def _seals(choice: StoreChoice, store: Store) -> tuple[CheckPayload | None, set[bytes]]:
    """Return the function that opens the seals of encrypted frames, and the namespaces that it can open."""
    if not choice.has_key:
        return None, set()
    try:
        from spillway_ctl.seal_check import SealCheck  # noqa: PLC0415 - its package may be missing
    except ImportError as error:
        raise CommandError(
            f"opening seals needs the package cryptography ({error}); install spillway-ctl[encryption]"
        ) from error
    store.check()
    check = SealCheck(list(store.namespaces()), choice.encryption_key_file, choice.encryption_key_env)
    return check, check.opens
