"""`spillway check --vllm`, with an environment whose vLLM is a small parser."""

import io
import json
import sys
import venv
from pathlib import Path

import pytest

from spillway_ctl.command import main

FILES = {
    "__init__.py": "__version__ = '0.32.1+cpu'\n",
    "_version.py": "__version__ = version = '0.32.1'\n",
    "utils/__init__.py": "",
    "utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "entrypoints/__init__.py": "",
    "entrypoints/launchers/__init__.py": "",
    "entrypoints/launchers/cli_args.py": """\
print("INFO: vLLM logs on standard output")
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    return parser
""",
}


IMAGE = 'engine:\n  image: {{vllm: "{}"}}'


def environment_of(folder: Path, version_of_vllm: str) -> Path:
    venv.create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name, text in FILES.items():
        file = folder / "lib" / version / "site-packages" / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("0.32", version_of_vllm))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_of(tmp_path_factory.mktemp("environment"), "0.32")


@pytest.fixture
def check(monkeypatch, capsys):
    def run(values: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(values))
        status = main(["check", "-", *arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_every_engine_is_judged_and_what_spillway_refuses_is_not_judged_again(check, environment):
    values = """
    engine: {image: {vllm: "0.32"}}
    engines:
      a: {model: {servedName: a}, extraArgs: [--enforce-eagr, --max-num-seqs=many]}
      b: {model: {servedName: b}, extraArgs: [--seed=1, --what-is-this=1]}
      c: {model: {servedName: c}, extraArgs: [--max-num-seqs, "8"]}
    gateway: {resources: {limits: {memory: 4GiB}}}
    """
    status, out, _ = check(values, "--vllm", f"0.32={environment}")

    assert status == 1 and out.splitlines()[1:] == [
        "- engines.b.extraArgs: --seed is decided by engines.b.model.seed; change that instead",
        "- engines.a.extraArgs: --enforce-eagr is no argument of vLLM 0.32; did you mean --enforce-eager?",
        '- engines.a.extraArgs: --max-num-seqs: "many" given, a whole number needed; write the number alone',
    ]


MIXED = """
engines:
  old: {model: {servedName: a}, extraArgs: [--enforce-eagr]}
  new: {model: {servedName: b}, image: {vllm: "0.32"}, extraArgs: [--max-num-seqs=many]}
  plain: {model: {servedName: c}}
gateway: {resources: {limits: {memory: 4GiB}}}
"""


def test_each_engine_is_judged_by_its_own_vllm(check, environment, tmp_path):
    old = environment_of(tmp_path, "0.23")

    _, out, _ = check(MIXED, "--vllm", f"0.32={environment}", "--vllm", f"0.23={old}")

    assert out.splitlines()[1:] == [
        '- engines.new.extraArgs: --max-num-seqs: "many" given, a whole number needed; write the number alone',
        "- engines.old.extraArgs: --enforce-eagr is no argument of vLLM 0.23; did you mean --enforce-eager?",
    ]


def test_an_engine_whose_vllm_is_not_there_is_named(check, environment):
    status, out, _ = check(MIXED, "--vllm", f"0.32={environment}")

    assert status == 1 and "engines.old.extraArgs:" not in out.partition("Not judged")[0]
    assert out.splitlines()[-1].startswith("Not judged by vLLM: engines.old.extraArgs; add --vllm 0.23=FOLDER")
    _, out, _ = check(MIXED, "--vllm", f"0.32={environment}", "--json")
    assert json.loads(out)["unjudged"] == {"engines.old": "0.23"}


def test_a_vllm_that_no_engine_has_is_no_question(check, environment):
    status, _, error = check("engine: {extraArgs: [--x]}", "--vllm", f"0.32={environment}")

    assert status == 2 and "engine.image.vllm: 0.23" in error and "set image.vllm to 0.32" in error


def test_right_arguments_are_right(check, environment):
    values = IMAGE.format("0.32") + "\n  extraArgs: [--max-num-seqs, '8', --enforce-eager]"

    python = environment / "bin" / "python"
    assert check(values, "--vllm", f"0.32={python}") == (0, "These values are right.\n", "")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            "0.33={environment}",
            "--vllm 0.33: vLLM 0.32 is installed in {environment}; run this command where vLLM 0.33",
        ),
        ("0.32=/no/such/folder", "--vllm 0.32: the vLLM in /no/such/folder gave no answer"),
    ],
)
def test_a_vllm_that_is_not_there_is_told(check, environment, asked, says):
    status, _, error = check(IMAGE.format(asked[:4]), "--vllm", asked.format(environment=environment))

    assert status == 2 and says.format(environment=environment) in error


def test_an_environment_without_vllm_is_told(check, tmp_path):
    venv.create(tmp_path)
    _, _, error = check(IMAGE.format("0.32"), "--vllm", f"0.32={tmp_path}")

    assert f"no vLLM is installed in {tmp_path}" in error and "--vllm 0.32=FOLDER" in error


def test_values_of_a_wrong_form_are_told_before_vllm_is_asked(check):
    status, out, _ = check("engine: {replcas: 3}", "--vllm", "0.32=/no/such/folder")

    assert status == 1 and "replicas" in out
