import struct
from pathlib import Path

from demo_samples import counted, rows_of, sample, whole_run

from spillway_stack.demo.chart import draw_chart
from spillway_stack.demo.phases import Phase


def size_of_png(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_a_chart_is_one_png_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "build" / "ttft.png"
    draw_chart(rows_of(whole_run()), "three documents", path)
    width, height = size_of_png(path)
    assert width > 1000 and height > 500
    assert [entry.name for entry in path.parent.iterdir()] == ["ttft.png"]


def test_a_run_with_a_fault_and_a_wide_spread_is_drawn_too(tmp_path: Path) -> None:
    rows = rows_of([sample(Phase.COLD), sample(Phase.DEVICE_HIT, delta=counted(), ttft_seconds=0.001)])
    draw_chart(rows, "one document", tmp_path / "ttft.png")
    size_of_png(tmp_path / "ttft.png")
