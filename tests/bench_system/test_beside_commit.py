from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import beside_commit
import pytest
from bench_report import BenchError

BENCH = """import json, pathlib, sys
import priced
folder = pathlib.Path("build/bench")
folder.mkdir(parents=True, exist_ok=True)
figures = {"cost_microseconds": priced.COST * float(sys.argv[1]), "rounds": "three", priced.NAME: 1.0}
(folder / "any.json").write_text(json.dumps(figures))
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Bench", "-c", "user.email=bench@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose tree costs three times what its only commit costs."""
    for name, text in (("bench/any.py", BENCH), ("part/src/priced.py", "COST, NAME = 2.0, 'only_old'\n")):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    (tmp_path / "part/src/priced.py").write_text("COST, NAME = 6.0, 'only_new'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def worktrees(repository: Path) -> int:
    listed = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True)
    return listed.stdout.count("\n")


def test_each_tree_runs_its_own_bench_with_its_own_sources(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beside_commit.main(["HEAD", "any", "--", "1.5"]) == 0
    report = json.loads((repository / beside_commit.OUTPUT).read_text(encoding="utf-8"))
    assert report["cost_microseconds_old"] == 3.0
    assert report["cost_microseconds_new"] == 9.0
    assert report["cost_microseconds_ratio"] == 3.0
    assert not any(key.startswith(("only_", "rounds_")) for key in report)
    assert "3.000 (3.000 to 3.000)" in capsys.readouterr().out
    assert worktrees(repository) == 1, "the checkout is gone"


def test_a_run_that_is_ended_leaves_no_checkout(repository: Path) -> None:
    begun = repository / "begun"
    waits = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    (repository / "bench/any.py").write_text(waits, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, beside_commit.__file__, "HEAD", "any", "--", "1"], cwd=repository
    ) as running:
        while not begun.exists():
            assert running.poll() is None
            time.sleep(0.01)
        assert worktrees(repository) == 2
        running.terminate()
    assert running.returncode == 143
    assert worktrees(repository) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-commit", "any", "--", "1"], "git cannot check out 'no-such-commit'"),
        (["HEAD", "other"], "other of .* ended with 2"),
        (["HEAD", "any", "--rounds", "7", "--", "1"], "even and at least"),
        (["HEAD", "any", "--keys", "absent", "--", "1"], "no figure is in all reports"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(repository: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        beside_commit.main(arguments)


def test_a_ratio_is_outside_if_the_old_commit_alone_does_not_explain_it() -> None:
    costs = [(1.0, 1.1), (1.2, 1.32), (0.9, 0.99), (1.0, 1.1)]
    rounds = [{"old": {"cost": old}, "new": {"cost": new}} for old, new in costs]
    assert not beside_commit.compare(rounds)["cost"].is_outside
    rounds = [{"old": {"cost": old}, "new": {"cost": 1.3 * old}} for old, _ in costs]
    assert beside_commit.compare(rounds)["cost"].is_outside
    assert beside_commit.compare(rounds)["cost"].ratio.median == pytest.approx(1.3)
