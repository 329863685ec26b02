from demo_samples import counted, rows_of, sample, whole_run

from spillway_stack.demo.command import closing_sentences
from spillway_stack.demo.phases import Phase
from spillway_stack.demo.table import duration, footnotes, header, line


def test_every_row_fits_under_the_header() -> None:
    titles, rule = header().splitlines()
    for row in rows_of(whole_run()):
        text = line(row)
        assert text.startswith(row.phase)
        assert text.index(row.engine) == titles.index("engine")
        assert text.rindex("yes") == titles.index("identical")
        assert len(text) <= len(rule)


def test_a_row_shows_its_figures() -> None:
    text = line(rows_of(whole_run())[2])
    assert text.split() == [
        "CPU",
        "tier,",
        "after",
        "eviction",
        "engine-0",
        "cpu",
        "4,150",
        "4,096",
        "400",
        "ms",
        "10.0x",
        "yes",
    ]


def test_a_cold_row_is_computed() -> None:
    assert "computed" in line(rows_of(whole_run())[0])


def test_a_row_that_was_not_served_as_planned_is_marked_and_explained() -> None:
    samples = [sample(phase) for phase in (Phase.COLD, Phase.DEVICE_HIT)]
    rows = rows_of([*samples, sample(Phase.CPU_TIER, delta=counted())])
    assert "computed (!)" in line(rows[-1])
    assert "(!) CPU tier, after eviction: document 1: 4,150 computed" in footnotes(rows, 1)


def test_a_good_run_says_in_one_line_what_was_compared() -> None:
    notes = footnotes(rows_of(whole_run()), 3)
    assert len(notes) == 2
    assert "cold answer" in notes[1]


def test_rounding_is_reported_and_starred() -> None:
    rows = rows_of([sample(phase, token_ids=(1,) if phase is Phase.COLD else (2,)) for phase in Phase])
    assert line(rows[1]).endswith("no (rounding)")
    assert line(rows[2]).endswith("yes *")
    assert any("round differently" in note for note in footnotes(rows, 1))


def test_wrong_tokens_are_reported_in_full() -> None:
    rows = rows_of([sample(phase, token_ids=(2,) if phase is Phase.RESTARTED else (1,)) for phase in Phase])
    assert line(rows[4]).endswith("NO")
    assert any("answers differ" in note and "Lisbon" in note for note in footnotes(rows, 1))


def test_durations_are_short() -> None:
    assert [duration(seconds) for seconds in (0.0123, 0.4, 1.0, 12.345)] == ["12 ms", "400 ms", "1.00 s", "12.35 s"]


def test_two_sentences_close_with_honest_labels() -> None:
    rows = rows_of(whole_run())
    figures, limits = closing_sentences(rows, bytes_per_token=23_040, platform="cpu")
    for figure in ("4,150 tokens", "96 MB", "4.00 s", "400 ms", "500 ms to 800 ms"):
        assert figure in figures
    assert "stands in for an NPU" in limits
    assert "host memory to host memory" in limits
    assert "stands in" not in closing_sentences(rows, 23_040, "npu")[1]
