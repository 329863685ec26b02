"""The messages to a user who gets something wrong, and the exit statuses that scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ctl_media import ONE, PAGE_BYTES, FileMedium, RedisMedium, fill, key_of

from spillway_ctl.command import main
from spillway_ctl.frame_filter import FrameFilter
from spillway_ctl.interruption import Interruption
from spillway_ctl.purge import purge
from spillway_ctl.run import DECLINED, Run
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import hash_key
from spillway_gateway.config.settings import AuthConfig
from spillway_settings.typed import read_settings

PASSWORD = "not-for-your-eyes"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = main(list(arguments))
    except SystemExit as stopped:  # argparse
        status = stopped.code
    message = capsys.readouterr()
    assert status == 2 and message.out == "" and message.err.startswith("spillway: ")
    assert message.err.count("\n") == 1
    return message.err


def test_every_help_has_examples_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "ls", "verify", "purge", "tenant"):
        with pytest.raises(SystemExit) as stopped:
            main(["tier", command, "--help"])
        out = capsys.readouterr().out
        assert stopped.value.code == 0 and f"spillway tier {command} " in out
        assert "examples:" in out and "exit status:" in out


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("status",), "--nvme DIR"),
        (("status", "--nvme", "/nowhere/at/all"), "no such directory"),
        (("status", "--nvme", "/etc"), "not a directory of Spillway's"),
        (("status", "--nvme", "/etc/hostname"), "Not a directory"),
        (("status", "--nvme", "/x", "--redis", "redis://y"), "not allowed with"),
        (("status", "--redis", "http://cache:6379"), "redis://HOST:PORT/DB"),
        (("status", "--redis", f"redis://me:{PASSWORD}@cache:6379"), "must not carry a user or password"),
        (("status", "--nvme", "/x", "--password-env", "Y"), "--password-env is for Redis"),
        (("status", "--redis", "redis://cache", "--password-env", "SURELY_UNSET"), "SURELY_UNSET"),
        (("status", "--config", "/nowhere.yaml"), "give a readable YAML file"),
        (("ls", "--nvme", "/x", "--older-than", "7 days"), "write for example 30m"),
        (("ls", "--nvme", "/x", "--tenant", "me"), "16 hex digits"),
        (("ls", "--nvme", "/x", "--namespace", "xyz"), "hex digits"),
        (("ls", "--nvme", "/x", "--limit", "0"), "1 or more"),
        (("verify", "--nvme", "/x", "--rate-limit", "fast"), "200MiB/s"),
        (("purge", "--nvme", "/x"), "or --all"),
        (("purge", "--nvme", "/x", "--all", "--older-than", "1d"), "contradicts"),
        (("purge", "--nvme", "/x", "--all", "--json"), "--yes or --dry-run"),
        (("purge", "--nvme", "/x", "--all"), "no terminal"),
        (("tenant", "--salt-env", "SURELY_UNSET"), "SURELY_UNSET"),
        (("tenant", "--salt-env", "A", "--salt-secret-file", "B"), "read with --name alone"),
        (("tenant",), "--salt-env --name is required"),
        (("frobnicate",), "invalid choice"),
    ],
)
def test_mistakes_are_one_sentence_with_a_remedy(
    arguments: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(capsys, "tier", *arguments)
    assert remedy in sentence and PASSWORD not in sentence


def test_a_server_that_is_away_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "ls", "verify"):
        assert "127.0.0.1:1" in refused(capsys, "tier", command, "--redis", "redis://127.0.0.1:1/0", "--timeout", "1s")


def test_the_exit_status_tells_damage_from_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, [1])
    assert main(["tier", "verify", *files.options]) == 0
    files.overwrite(ONE, key_of(1), PAGE_BYTES, b"spoiled")
    assert main(["tier", "status", *files.options]) == 0
    assert main(["tier", "verify", *files.options]) == 1


def test_a_directory_that_is_empty_holds_nothing_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tier", "status", "--nvme", str(tmp_path)]) == 0
    assert "nothing is stored here yet" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_purge_asks_and_takes_no_for_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(3))
    store = files.store()
    run = Run(store, FrameFilter(ONE.hex[:4]), store.now_s(), Interruption())
    questions: list[str] = []

    def no(question: str) -> bool:
        questions.append(question)
        return False

    assert purge(run, dry_run=False, yes=False, ask=no) == DECLINED
    assert questions == [f"Remove 3 frames (60.0 KiB) of namespace {ONE.hex[:4]}... from the {run.where}?"] or (
        "Remove 3 frames" in questions[0]
    )
    assert len(list(store.frames(headers=False))) == 3
    assert purge(run, dry_run=False, yes=False, ask=lambda question: True) == 0
    assert list(store.frames(headers=False)) == []
    store.close()


def test_an_interruption_ends_a_purge_between_two_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = FileMedium(tmp_path / "tier")
    fill(files, range(300))
    store = files.store()
    interruption = Interruption()
    run = Run(store, FrameFilter(), store.now_s(), interruption)
    remove = store.remove

    def remove_and_interrupt(*arguments: object, **options: object) -> object:
        interruption.ask()
        return remove(*arguments, **options)

    store.remove = remove_and_interrupt
    assert purge(run, dry_run=False, yes=True, ask=None) == 130
    assert "interrupted: removed 128 frames" in capsys.readouterr().out
    assert len(list(store.frames(headers=False))) == 300 - 128
    store.close()


def test_the_tenant_of_a_salt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SALT", "customer-7")
    assert main(["tier", "tenant", "--salt-env", "SALT"]) == 0
    out = capsys.readouterr().out
    assert len(out.strip()) == 16 and "customer" not in out


def test_a_name_needs_the_whole_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short").write_text("s" * 31)
    command = ("tier", "tenant", "--name", "search")

    assert "--name needs --salt-secret-file" in refused(capsys, *command)
    assert "cannot be read" in refused(capsys, *command, "--salt-secret-file", str(tmp_path / "none"))
    short = refused(capsys, *command, "--salt-secret-file", str(tmp_path / "short"))
    assert "31 bytes given, at least 32 needed" in short and "sss" not in short


@pytest.mark.parametrize("own", [None, "thread-9"])
def test_the_tenant_of_a_name_is_the_one_of_the_gateways_salt(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, secret = tmp_path / "keys.yaml", tmp_path / "salt"
    keys.write_text(json.dumps({"tenants": [{"name": "search", "keys": [hash_key("sk-" + "k" * 40)]}]}))
    secret.write_text("s" * 64 + "\n")
    config = {"keysFile": str(keys), "saltSecretFile": str(secret)}
    gatekeeper = Gatekeeper(read_settings(AuthConfig, config))
    salt = gatekeeper.salt(gatekeeper.tenant_of([(b"authorization", b"Bearer sk-" + b"k" * 40)]), own)
    assert salt is not None
    monkeypatch.setenv("SALT", salt)

    assert main(["tier", "tenant", "--salt-env", "SALT"]) == 0
    assert main(["tier", "tenant", "--name", "search", "--salt-secret-file", str(secret)]) == 0
    first, second = capsys.readouterr().out.split()
    assert first == second


@pytest.mark.parametrize("kind", ["nvme", "redis"])
def test_an_engines_configuration_names_the_tier(
    kind: str, tmp_path: Path, valkey, capsys: pytest.CaptureFixture[str]
) -> None:
    medium = RedisMedium(valkey.port) if kind == "redis" else FileMedium(tmp_path / "tier")
    fill(medium, range(2))
    config = tmp_path / "engine.yaml"
    config.write_text(
        f"""
model: {{path: /models/small}}
offload:
  numCpuBlocks: 8
  sharedTier:
    type: {kind}
    nvme: {{path: {tmp_path / "tier"}, maxBytes: 1GiB}}
    redis: {{url: "redis://127.0.0.1:{valkey.port}/0"}}
"""
    )
    assert main(["tier", "status", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "2 (" in out and ("the limit is maxBytes" in out or kind == "redis")


def test_an_engine_without_a_shared_tier_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("{model: {path: /models/small}, offload: {numCpuBlocks: 8}}")
    assert "no shared tier" in refused(capsys, "tier", "status", "--config", str(config))
