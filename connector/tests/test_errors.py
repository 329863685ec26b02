"""Errors that are kept."""

from __future__ import annotations

import traceback

from spillway_connector.errors import RefusedReason, TierMiss, TierRefused, without_frames


def caught() -> TierRefused:
    """Return an error with a cause, and with a miss that was being handled when the cause was raised."""
    try:
        try:
            try:
                raise TierMiss
            except TierMiss:
                raise ValueError("the cause")  # noqa: B904
        except ValueError as error:
            raise TierRefused(RefusedReason.OTHER, "the sentence") from error
    except TierRefused as refused:
        return refused


def test_an_error_that_is_kept_keeps_its_words_and_no_frame() -> None:
    error = caught()
    assert len(traceback.extract_tb(error.__traceback__)) == 1
    assert without_frames(error) is error
    assert (error.reason, str(error)) == (RefusedReason.OTHER, "the sentence")
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error.__cause__.__context__, TierMiss)
    for one in (error, error.__cause__, error.__cause__.__context__):
        assert one.__traceback__ is None


def test_errors_that_led_to_each_other_are_no_trap() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert without_frames(one) is one
