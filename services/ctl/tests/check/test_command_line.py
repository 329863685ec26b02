"""`spillway check` as a person runs it: files, exit status, sentences, JSON, and what helm template rendered."""

import io
import json

import msgspec
import pytest
import yaml

from spillway_ctl.command import main
from spillway_settings.values.release import Values


@pytest.fixture
def check(monkeypatch, capsys):
    def run(*arguments: str, given: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        status = main(["check", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_right_values_end_with_zero(check):
    assert check("-", given="engine: {replicas: 3}") == (0, "These values are right.\n", "")


def test_every_mistake_is_a_sentence_and_the_status_is_one(check):
    status, out, _ = check("-", given="engine: {port: 8200}\nredis: {enabled: true}")

    assert status == 1 and out.count("\n- ") == 2
    assert "engine.port: 8200 is also" in out or "kvEvents.port: 8200 is also port" in out


def test_json_has_setting_problem_remedy_and_sentence(check):
    status, out, _ = check("-", "--json", given="redis: {enabled: true}")
    [finding] = json.loads(out)["findings"]

    assert status == 1
    assert finding["setting"] == "redis.enabled" and finding["problem"] and finding["remedy"].startswith("set ")
    assert finding["sentence"] == f"redis.enabled: {finding['problem']}; {finding['remedy']}"


def test_files_and_settings_are_merged(check, tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("redis: {enabled: true}")

    assert check(str(file), "--set", "redis.enabled=false")[0] == 0
    assert check("-f", str(file), "--set-string", "redis.enabled=false")[1].startswith("These values cannot work")


def test_values_of_a_parent_chart(check):
    values = "spillway: {redis: {enabled: true}}\nglobal: {imageRegistry: reg.local}\nother: {x: 1}"

    assert "redis.enabled: true, but no engine uses it" in check("-", "--part", "spillway", given=values)[1]
    assert check("-", "--part", "spillway", given="spillway: {}\nglobal: {a: 1}")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no values given"),
        (("/no/such/file.yaml",), "/no/such/file.yaml: cannot be read"),
        (("-", "--part", "spillway"), "--part spillway: the values have no such map"),
        (("-", "--set", "a"), "write KEY=VALUE"),
        (("--rendered", "-"), "no values are in what was rendered"),
        (("--rendered", "-", "--set", "a=1"), "give files and --set to helm template instead"),
    ],
)
def test_a_wrong_command_ends_with_two(check, arguments, words):
    status, _, errors = check(*arguments, given="engine: {}")

    assert status == 2 and words in errors


def test_kinds_and_fields_that_the_cluster_lacks(check):
    values = "monitoring: {podMonitor: {enabled: true}}\nengine: {tolerations: [{key: a, operator: Gt, value: '1'}]}"

    assert check("-", given=values)[0] == 0
    out = check("-", "--kube-version", "v1.32.1", "--api-versions", "", given=values)[1]
    assert "this cluster has no monitoring.coreos.com/v1/PodMonitor" in out and "came with 1.35" in out


def test_a_note_refuses_nothing(check):
    values = "gateway: {service: {type: NodePort, nodePort: 80}}"

    status, out, _ = check("-", given=values)
    assert status == 0
    assert out.startswith("These values are right.\nNote: gateway.service.nodePort: 80 given, but Kubernetes has 30000")
    assert json.loads(check("-", "--json", given=values)[1])["findings"][0]["is_note"] is True

    status, out, _ = check("-", given=f"{values}\nengine: {{replicas: many}}".replace("80", "30080"))
    assert status == 1 and "Note" not in out


@pytest.mark.parametrize(
    ("asked", "given", "note"),
    [
        ("--spec-method=dspark", "null", ""),
        (
            "--spec-model=acme/dspark_qwen3",
            "null",
            "draftLayers: the drafter acme/dspark_qwen3 says in its config.json",
        ),
        ("--spec-model=acme/dspark_qwen3", "5", ""),
        ("--spec-model=acme/eagle3", "null", ""),
    ],
)
def test_a_drafter_without_a_number_of_layers_is_noted(check, asked, given, note):
    values = f"engine: {{model: {{shape: {{draftLayers: {given}}}}}, extraArgs: ['{asked}', '--spec-tokens=3']}}"
    status, out, _ = check("-", given=values)
    assert (status, "draftLayers" in out) == (0, bool(note)) and note in out


def test_whole_values_say_by_their_absence_what_null_removed(check):
    given = yaml.safe_dump({"engine": {"offload": {"cpuBytes": "100GiB"}}})

    assert "both size the CPU tier" in check("-", given=given)[1]
    whole = msgspec.to_builtins(Values())
    whole["engine"]["offload"]["cpuBytes"] = "100GiB"
    del whole["engine"]["offload"]["numCpuBlocks"]
    assert check("-", "--whole", given=json.dumps(whole))[:2] == (0, "These values are right.\n")
    secret = {
        "kind": "Secret",
        "metadata": {"labels": {"app.kubernetes.io/component": "check"}},
        "stringData": {"values.yaml": json.dumps(whole)},
    }
    rendered = yaml.safe_dump_all([{"kind": "Service"}, secret, None])
    assert check("--rendered", "-", given=rendered)[0] == 0
    whole["redis"]["enabled"] = True
    secret["stringData"]["values.yaml"] = json.dumps(whole)
    assert check("--rendered", "-", given=yaml.safe_dump(secret))[0] == 1
