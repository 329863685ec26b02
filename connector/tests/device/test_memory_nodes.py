from pathlib import Path

import pytest

from spillway_connector.device.memory_nodes import has_several_memory_nodes


@pytest.mark.parametrize(("listed", "several"), [("0\n", False), ("0-7\n", True), ("0,2\n", True), ("", False)])
def test_nodes_are_counted_from_the_kernels_list(tmp_path: Path, listed: str, several: bool) -> None:
    (tmp_path / "has_memory").write_text(listed)

    assert has_several_memory_nodes(tmp_path / "has_memory") is several


def test_a_kernel_without_nodes_has_one(tmp_path: Path) -> None:
    assert not has_several_memory_nodes(tmp_path / "none")
