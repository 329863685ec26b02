from pathlib import Path

import pytest

from spillway_stack.demo.command import main
from spillway_stack.demo.running_stack import limits_from_configuration, require_offload
from spillway_stack.errors import StackError
from spillway_stack.settings import StackSettings


def test_without_a_stack_the_error_names_what_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--state-dir", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 1
    assert "no stack is running" in (message := capsys.readouterr().err)
    assert "make up" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (StackSettings(engines=1), "ENGINES=2"),
        (StackSettings(offload=False), "OFFLOAD=on"),
        (StackSettings(shared_tier="none"), "SHARED_TIER=nvme or SHARED_TIER=redis"),
        (StackSettings(gateway=False), "gateway"),
    ],
)
def test_a_stack_with_nothing_to_show_is_refused(settings: StackSettings, remedy: str) -> None:
    with pytest.raises(StackError, match=remedy):
        require_offload(settings)


def test_the_default_stack_has_all_that_is_needed() -> None:
    require_offload(StackSettings())


CONFIGURATION = {
    "settings": {"model": {"maxLength": 8192}, "blockSize": 128, "offload": {"blocksPerChunk": 2}},
    "memory": {"device_blocks": 80, "cpu_chunks": 96, "bytes_per_token": 23_040},
}


def test_limits_are_read_from_the_engines_configuration() -> None:
    limits = limits_from_configuration(CONFIGURATION)
    assert (limits.max_length, limits.chunk_tokens, limits.device_tokens, limits.cpu_chunks) == (
        *(8192, 256, 79 * 128, 96),
    )


def test_an_unstated_device_cache_is_refused() -> None:
    unstated = {**CONFIGURATION, "memory": {**CONFIGURATION["memory"], "device_blocks": None}}
    with pytest.raises(StackError, match="DEVICE_BLOCKS"):
        limits_from_configuration(unstated)
