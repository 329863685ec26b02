from spillway_engine.ascend_acceptance.answers import Answers, compared, document
from spillway_engine.near_ties import Scored

SURE = ({7: -0.1, 8: -3.0},)
OTHER = ({9: -0.1, 8: -3.0},)


def test_documents_differ_from_the_first_line_on() -> None:
    one, other = document(1, 20), document(2, 20)
    assert one == document(1, 20)
    assert one.splitlines()[0] != other.splitlines()[0]


def test_computed_and_loaded_answers_are_both_compared() -> None:
    right, wrong = Scored((7,), SURE), Scored((9,), OTHER)
    assert compared([right], Answers([right], [right], 128)) == ([], 2, 2)

    different, _, _ = compared([right], Answers([right], [wrong], 128))

    assert len(different) == 1 and different[0].startswith("prompt 1, loaded: token 1: log p(7)")
