"""One real engine, started once: healthy as it is, refused in each way in which it is broken, healthy again."""

from collections.abc import Iterator

import pytest

from self_check.broken import BROKEN
from self_check.engine import Engine
from spillway_stack.bundled_model import prepare

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("engine"), prepare(lambda line: None)) as running:
        yield running


def test_a_healthy_engine_passes_the_check_of_its_start(engine: Engine) -> None:
    assert engine.verdict.healthy, engine.verdict.message


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_engine_is_refused_with_what_was_measured(engine: Engine, name: str) -> None:
    await engine.order(*BROKEN[name])
    try:
        verdict = await engine.check(engine.brief())
    finally:
        await engine.order("mend")

    assert not verdict.healthy, verdict.message
    assert "expected" in verdict.message and "lifecycle.selfCheck: off serves it as it is" in verdict.message


async def test_a_mended_engine_passes_with_a_reference_and_without(engine: Engine) -> None:
    """Shows that it was the damage that was refused."""
    text = "The sun rises in the east, and it sets in the west every evening."
    for brief in (engine.brief(), engine.brief(**{"lifecycle.selfCheckText": text})):
        verdict = await engine.check(brief)
        assert verdict.healthy, verdict.message
