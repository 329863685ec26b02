"""The cached tokens that prompts were expected to find, and found, in each minute of the last hour: the curves of the
operations page."""

from __future__ import annotations

from collections import deque

from spillway_gateway.routing.fleet_view import HeldPrefix, TierLabel

MINUTES = 60
MINUTE_SECONDS = 60.0


class Minute:
    """Tokens of the replies of one minute that say how many were cached. number: minutes since the epoch.

    missing: tokens by which prompts found less than expected, by the tier in which the first of them was expected.
    """

    __slots__ = ("expected", "missing", "number", "reported")

    def __init__(self, number: int) -> None:
        self.number = number
        self.expected = 0
        self.reported = 0
        self.missing = dict.fromkeys(TierLabel, 0)


class LastHour:
    """One model's. On the event loop only. Minutes without a reply take no room."""

    def __init__(self) -> None:
        self._minutes: deque[Minute] = deque(maxlen=MINUTES)

    def add(self, now: float, held: HeldPrefix, cached_tokens: int) -> None:
        """An engine has reported how many tokens of a prompt were cached. now: time(). held: what was expected."""
        number = int(now // MINUTE_SECONDS)
        if not self._minutes or self._minutes[-1].number < number:  # a clock that was set back adds to the last one
            self._minutes.append(Minute(number))
        minute = self._minutes[-1]
        minute.expected += held.total_tokens
        minute.reported += cached_tokens
        tier = held.tier_of_first_missing(cached_tokens)
        if tier is not None:
            minute.missing[tier] += held.total_tokens - cached_tokens

    def minutes(self, now: float) -> list[Minute]:
        """The last MINUTES minutes, the current one last; those without a reply are empty."""
        last = int(now // MINUTE_SECONDS)
        known = {minute.number: minute for minute in self._minutes}
        return [known.get(number) or Minute(number) for number in range(last - MINUTES + 1, last + 1)]
