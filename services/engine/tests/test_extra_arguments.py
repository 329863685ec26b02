import pytest

from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import argument_name, check_extra_arguments, is_secret


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--kv_transfer_config={}", "--kv-transfer-config"),
        ("--kv-transfer-config.kv_role", "--kv-transfer-config"),
        ("--api-key x", "--api-key"),
        ("-tp", "-tp"),
        ("8", None),
        ("{}", None),
    ],
)
def test_a_name_is_read_as_vllm_reads_it(argument: str, name: str | None) -> None:
    assert argument_name(argument) == name


def test_every_refusal_is_told_at_once_and_names_what_decides() -> None:
    with pytest.raises(SettingsError) as refused:
        check_extra_arguments(
            ["--max-num-seqs", "8", "-tp=2", "--served_model", "x", "--config=a.yaml", "--hf-to", "hf_abc"],
            SettingNames(others="engine.{path}"),
        )

    assert str(refused.value).splitlines() == [
        "engine.extraArgs: -tp is decided by engine.tensorParallelSize; change that instead",
        "engine.extraArgs: --served-model is decided by engine.model.servedName; change that instead",
        "engine.extraArgs: --config would bring arguments past this check; write them here one by one",
        "engine.extraArgs: --hf-to would show a secret in this setting and in the list of processes; "
        "use the environment variable HF_TOKEN",
    ]


@pytest.mark.parametrize("argument", ["--api-key=k1", "--api_key=k1", "--api-k=k1", "--proxy-password=k1"])
def test_a_secret_is_refused_and_not_repeated(argument: str) -> None:
    assert is_secret(argument)
    with pytest.raises(SettingsError) as refused:
        check_extra_arguments([argument], PLAIN_NAMES)
    assert "k1" not in str(refused.value)


def test_what_spillway_does_not_decide_passes() -> None:
    check_extra_arguments(
        ["--max-num-seqs=8", "--max-num-batched-tokens", "512", "--enforce-eager", "-O3", "--middleware", "a.b",
         "--allow-credentials", "-1", "-"],
        PLAIN_NAMES,
    )  # fmt: skip
