"""vLLM's own tests of offloading, from its source archive, with Spillway's classes in place of vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm

from upstream.archives import ARCHIVES, ArchiveError, _Links, unpacked
from upstream.cases import RUN_SECONDS_MAX, Cases, Outcome, cases_of, files_in, run, stale, unlisted

CASES = cases_of(vllm.__version__.partition("+")[0])

pytestmark = [
    pytest.mark.skipif(CASES is None, reason=f"no list of the tests of vLLM {vllm.__version__}"),
    pytest.mark.timeout(RUN_SECONDS_MAX + 300),
]


@pytest.fixture(scope="module")
def cases() -> Cases:
    assert CASES is not None
    return CASES


@pytest.fixture(scope="module")
def outcomes(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run(cases, tmp_path_factory.mktemp("upstream"))


def test_every_file_of_the_archive_is_listed_and_every_entry_is_there(cases: Cases) -> None:
    files = files_in(cases.archive)
    assert files
    assert unlisted(cases, files) == []
    assert stale(cases, files) == []


@pytest.mark.parametrize("file", CASES.run if CASES is not None else [])
def test_every_case_that_applies_passes(outcomes: dict[str, Outcome], file: str) -> None:
    outcome = outcomes[file]
    assert outcome.not_passed == ()
    assert outcome.passed


def test_an_archive_with_other_bytes_is_refused(cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_UPSTREAM", str(tmp_path))
    with pytest.raises(ArchiveError, match="not 0000"):
        unpacked(cases.archive._replace(sha256="0" * 64))
    assert list(tmp_path.iterdir()) == []


def test_links_of_an_index_page_may_be_relative() -> None:
    links = _Links("https://index.example/simple/vllm/")
    links.feed('<a href="../../files/vllm-1.0.tar.gz#sha256=ab">vllm</a>')
    assert links.by_name == {"vllm-1.0.tar.gz": "https://index.example/files/vllm-1.0.tar.gz#sha256=ab"}
    assert set(ARCHIVES) == {"0.23.0", "0.32.0", "0.33.0"}
