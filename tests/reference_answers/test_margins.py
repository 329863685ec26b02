import json

from hypothesis import given
from hypothesis import strategies as st

from reference_answers.margins import (
    DECIDED,
    MARGIN_LEAST,
    ROUNDING,
    Scored,
    compared_tokens,
    difference,
    differences,
    scored,
)


def answer(*positions: dict[int, float]) -> Scored:
    return Scored(tuple(max(top, key=lambda token: top[token]) for top in positions), positions)


SURE = {7: -0.1, 8: -3.0, 9: -3.5}
TIE = {7: -1.00, 8: -1.01, 9: -3.0}
TURNED = {7: -1.02, 8: -1.00, 9: -3.0}
OTHER = {1: -0.1, 2: -3.0, 3: -3.5}


def test_equal_answers_are_equal() -> None:
    assert difference(answer(SURE, TIE), answer(SURE, TIE)) is None


def test_rounding_is_no_difference() -> None:
    assert difference(answer(SURE), answer({token: value + 0.1 for token, value in SURE.items()})) is None


def test_a_near_tie_may_turn_and_ends_the_comparison() -> None:
    assert difference(answer(SURE, TIE, SURE), answer(SURE, TURNED, OTHER)) is None


def test_a_token_that_leads_may_not_be_another() -> None:
    assert "token 2: log p(7)" in str(difference(answer(SURE, SURE), answer(SURE, OTHER)))


def test_the_same_token_with_another_probability_is_a_difference() -> None:
    """KV that is slightly wrong seldom changes a token; it does change how likely it is."""
    assert difference(answer(SURE), answer({7: -0.6, 8: -1.5, 9: -2.5})) is not None


def test_unlikely_tokens_may_move() -> None:
    assert difference(answer({7: -0.01, 8: -9.0}), answer({7: -0.01, 8: -11.0})) is None


def test_a_token_beyond_the_most_likely_may_have_been_just_below_them() -> None:
    assert difference(answer({1: -1.0, 2: -1.50}), answer({1: -1.0, 3: -1.49})) is None
    assert difference(answer({1: -1.0, 2: -1.2}), answer({1: -1.0, 3: -2.5})) is not None


def test_pieces_add_up_and_survive_json() -> None:
    whole = answer(SURE, TIE)
    assert answer(SURE) + answer(TIE) == whole
    assert Scored.from_json(json.loads(json.dumps(whole.as_json()))) == whole


def test_what_was_compared_is_counted() -> None:
    assert compared_tokens(answer(SURE, TIE), answer(SURE, TIE)) == 2
    assert compared_tokens(answer(SURE, TIE, SURE), answer(SURE, TURNED, SURE)) == 2


def test_lengths_count() -> None:
    assert difference(answer(SURE), answer(SURE, SURE)) == "1 tokens and 2"


def test_the_place_of_each_difference_is_reported() -> None:
    assert list(differences([answer(SURE), answer(SURE)], [answer(SURE), answer(OTHER)])) == [1]


@given(st.floats(0.0, 10.0), st.floats(-ROUNDING, ROUNDING), st.floats(-ROUNDING, ROUNDING))
def test_a_lead_that_counts_as_decided_is_one_in_float32(lead: float, best_moves: float, next_moves: float) -> None:
    measured = lead + best_moves - next_moves
    assert measured < DECIDED or lead >= MARGIN_LEAST - 1e-9


@given(st.lists(st.dictionaries(st.integers(0, 9), st.floats(-8, 0), min_size=2, max_size=5), min_size=1, max_size=4))
def test_the_order_of_two_answers_does_not_matter(tops: list[dict[int, float]]) -> None:
    one, other = answer(*tops), answer(*reversed(tops))
    assert (difference(one, other) is None) == (difference(other, one) is None)
    assert difference(one, one) is None


def test_reads_vllms_choice() -> None:
    choice = {
        "token_ids": [11, 12],
        "logprobs": {
            "top_logprobs": [{"token_id:11": -0.5, "token_id:3": -2.5}, {"token_id:12": -0.7, "token_id:4": -1}]
        },
    }
    parsed = scored(choice)
    assert parsed.tokens == (11, 12)
    assert parsed.tops[0] == {11: -0.5, 3: -2.5}
    assert [round(lead, 3) for lead in parsed.leads] == [2.0, 0.3]
