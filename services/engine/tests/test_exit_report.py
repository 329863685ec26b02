import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_engine.exit_report import LINES_KEPT, OutputTail, exit_code_of, explain_exit, root_cause

VLLM_LOG = [
    "(APIServer pid=1) INFO 11-21 12:50:02 [vllm.py:999] Asynchronous scheduling is enabled.",
    "ERROR 11-21 12:37:20 [multiproc_executor.py:888]     raise ValueError(",
    "ERROR 11-21 12:37:20 [multiproc_executor.py:888] ValueError: Available memory is less than desired.",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
]


def test_the_cause_is_the_first_error_and_not_its_echo() -> None:
    assert root_cause(VLLM_LOG) == "ValueError: Available memory is less than desired."


def test_an_echo_is_better_than_nothing() -> None:
    assert root_cause(VLLM_LOG[3:]) == "RuntimeError: Engine core initialization failed. See root cause above."
    assert root_cause(VLLM_LOG[:1]) is None


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (1, "the engine ended by itself with status 1: ValueError"),
        (-9, "the engine was killed (SIGKILL; most often the memory limit"),
        (-11, "the engine died of SIGSEGV: ValueError"),
    ],
)
def test_one_sentence_says_how_and_why(status: int, message: str) -> None:
    assert explain_exit(status, VLLM_LOG).startswith(message)


def test_an_exception_that_vllm_has_caught_is_no_cause() -> None:
    lines = [
        '(APIServer pid=7) WARNING 11-26 01:50:04 [base.py:249]     raise ValueError("no tokenizer")',
        "(APIServer pid=7) WARNING 11-26 01:50:04 [base.py:249] ValueError: no tokenizer",
        "INFO 11-26 01:50:05 [x.py:1] OSError: tried again",
        "(EngineCore_DP0 pid=9) ERROR 11-26 01:50:14 [core.py:1197] RuntimeError: Connection reset by peer",
    ]

    assert explain_exit(0, lines).endswith("with status 0: RuntimeError: Connection reset by peer")


def test_exit_codes_are_those_of_a_shell() -> None:
    assert (exit_code_of(0), exit_code_of(3), exit_code_of(-9)) == (0, 3, 137)


@given(text=st.text(max_size=2000), cuts=st.lists(st.integers(1, 50), max_size=40))
def test_lines_do_not_depend_on_how_the_bytes_arrive(text: str, cuts: list[int]) -> None:
    data = text.encode()
    whole, pieces = OutputTail(), OutputTail()
    whole.feed(data)
    start = 0
    for cut in cuts:
        pieces.feed(data[start : start + cut])
        start += cut
    pieces.feed(data[start:])

    if max(map(len, data.split(b"\n"))) < 600:
        assert whole.lines() == pieces.lines()


def test_the_tail_is_bounded() -> None:
    tail = OutputTail()
    tail.feed(b"x\n" * (LINES_KEPT * 2) + b"y" * 10_000)

    assert len(tail.lines()) == LINES_KEPT + 1
    assert len(tail.lines()[-1]) <= 600
