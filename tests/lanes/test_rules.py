"""Every test file has a rule, every rule a file, and rules are enforced."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path, PurePath

import pytest

from lanes import rules
from lanes.environments import vllm_here
from lanes.rules import NEEDS, ROOT, RULES, Lane, NoRule, lane_of, lanes_below, needs_of, needs_of_command
from lanes.small_repository import run_in_repository

FOLDERS = (
    *(ROOT / name / "tests" for name in ("settings", "connector", "gateway")),
    *ROOT.glob("services/*/tests"),
    ROOT / "tests",
)
BY_NAME_ALONE = "tests/ui/page_in_chromium.py"  # collected only if it is named


@cache
def test_files() -> tuple[Path, ...]:
    return (*(path for folder in FOLDERS for path in sorted(folder.rglob("test_*.py"))), ROOT / BY_NAME_ALONE)


test_files.__test__ = False  # type: ignore[attr-defined]


def test_every_test_file_has_a_rule() -> None:
    for path in test_files():
        assert lane_of(needs_of(path)) in Lane


def test_every_rule_is_of_a_folder_with_tests_or_of_a_test_and_differs_from_the_one_around_it() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in test_files()}
    folders = {path.rsplit("/", 1)[0] for path in files}
    assert set(RULES) <= files | folders
    assert all(set(needs) <= set(NEEDS) and needs for needs in RULES.values())
    assert [named for named, needs in RULES.items() if rules.nearest(RULES, PurePath(named).parent) == needs] == []


def test_what_another_vllm_runs_exists_and_what_only_it_runs_is_listed() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in test_files()}
    folders = {path.rsplit("/", 1)[0] for path in files}
    over_a_stack = {ROOT / named.partition("::")[0] for named in rules.STACK_TESTS}
    assert set(rules.OTHER_VLLM) <= files | folders
    for path in test_files():
        run = rules.other_vllm_of(path) or path in over_a_stack
        assert "other_vllm" not in needs_of(path) or run, f"{path}: no vLLM runs it"
        assert rules.LOCAL_VLLM not in rules.other_vllm_of(path)


def test_another_vllm_is_looked_up_as_rules_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "OTHER_VLLM", {"a": ("0.30",), "a/test_x.py": ("0.32",)})
    assert rules.other_vllm_of(ROOT / "a" / "test_y.py") == ("0.30",)
    assert rules.other_vllm_of(ROOT / "a" / "test_x.py") == ("0.32",)
    assert rules.other_vllm_of(ROOT / "b" / "test_x.py") == ()
    assert rules.holds_other_vllm(ROOT / "a", "0.32") and not rules.holds_other_vllm(ROOT / "b", "0.32")


def test_a_folder_without_a_rule_is_refused_with_the_place_to_add_one() -> None:
    with pytest.raises(NoRule, match=r'tests/new.*add "tests/new" to RULES'):
        needs_of(ROOT / "tests" / "new" / "test_it.py")


def test_a_file_has_its_entry_or_that_of_the_nearest_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", {"a": ("nothing",), "a/test_x.py": ("valkey",), "a/b": ("vllm", "valkey")})
    assert needs_of(ROOT / "a" / "test_x.py") == {"valkey"}
    assert needs_of(ROOT / "a" / "test_y.py") == set()
    assert needs_of(ROOT / "a" / "b" / "test_x.py") == {"vllm", "valkey"}
    assert needs_of(ROOT / "a" / "b" / "c" / "test_x.py") == {"vllm", "valkey"}
    assert needs_of(ROOT / "a" / "new" / "test_x.py") == set()
    assert lanes_below(ROOT / "a") == {Lane.UNIT, Lane.QUICK}
    assert lanes_below(ROOT / "a" / "b" / "c") == {Lane.QUICK}
    assert lanes_below(ROOT / "a" / "new") == {Lane.UNIT}
    assert lanes_below(ROOT / "c") == set()


def test_the_last_lane_of_all_needs_wins() -> None:
    assert [lane_of(needs) for needs in ([], ["valkey"], ["engines", "valkey"], ["cluster"])] == [
        Lane.UNIT,
        Lane.QUICK,
        Lane.FULL,
        Lane.CLUSTER,
    ]


def test_programs_are_recognised_by_any_word_of_their_command_line() -> None:
    assert needs_of_command(["/opt/v36/helm", "template"]) == {"helm"}
    assert needs_of_command([sys.executable, "-m", "spillway_gateway"]) == {"servers"}
    assert needs_of_command(["cc", "-o", "x"]) == set()


GUARDED = {
    "imports": ("def test_it():\n    import vllm\n", "imports vLLM"),
    "imports at once": ("import vllm\ndef test_it(): ...\n", "imports vLLM"),
    "starts": ("import subprocess\ndef test_it():\n    subprocess.run(['/x/valkey-server'])\n", "valkey-server"),
    "starts and suppresses the error": (
        "import subprocess\ndef test_it():\n    try: subprocess.run(['helm'])\n    except Exception: pass\n",
        "starts ['helm']",
    ),
}


@pytest.mark.parametrize(("source", "message"), GUARDED.values(), ids=GUARDED)
def test_what_a_rule_does_not_name_fails_the_test(source: str, message: str, tmp_path: Path) -> None:
    done = run_in_repository(tmp_path, {"tests/plain": ("nothing",)}, {"tests/plain/test_it.py": source})
    assert done.returncode != 0
    assert message in done.stdout and "tests/lanes/rules.py does not name" in done.stdout


def test_what_a_rule_names_is_allowed_and_marked(tmp_path: Path) -> None:
    source = "import subprocess\ndef test_it(request):\n    assert request.node.get_closest_marker('helm')\n"
    source += "    subprocess.run(['helm-of-no-kind'], check=False, executable='/bin/true')\n    import vllm\n"
    files = {"tests/a/test_it.py": source}
    assert run_in_repository(tmp_path, {"tests/a": ("helm", "vllm")}, files).returncode == 0


def test_a_file_without_a_rule_fails_collection(tmp_path: Path) -> None:
    done = run_in_repository(tmp_path, {}, {"tests/new/test_it.py": "def test_it(): ...\n"})
    assert done.returncode != 0
    assert 'add "tests/new" to RULES' in done.stdout


def test_files_of_other_lanes_are_not_imported(tmp_path: Path) -> None:
    files = {"tests/a/test_it.py": "def test_it(): ...\n", "tests/b/test_it.py": "raise SystemError\n"}
    rules = {"tests/a": ("nothing",), "tests/b": ("valkey",)}
    assert "1 passed" in run_in_repository(tmp_path, rules, files, "--lanes", "unit").stdout
    assert "SystemError" in run_in_repository(tmp_path, rules, files, "--lanes", "unit,quick").stdout


def test_another_vllms_lane_has_what_lists_its_version_whatever_else_it_needs(tmp_path: Path) -> None:
    """The version of this interpreter stands for the other one here."""
    files = {
        "tests/a/test_it.py": "def test_it(): ...\n",
        "tests/b/conftest.py": "raise SystemError\n",
        "tests/b/test_it.py": "raise SystemError\n",
        "tests/c/test_it.py": "def test_it(): ...\n",
    }
    all_rules = {"tests/a": ("vllm",), "tests/b": ("nothing",), "tests/c": ("other_vllm",)}
    other = {"tests/a": (vllm_here(),), "tests/c": (vllm_here(),), "tests/b": ("9.99",)}
    done = run_in_repository(tmp_path, all_rules, files, "--lanes", "other-vllm", other_vllm=other)
    assert "2 passed" in done.stdout, done.stdout
    assert "SystemError" in run_in_repository(tmp_path, all_rules, files, "--lanes", "unit", other_vllm=other).stdout
