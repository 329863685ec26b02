"""Learns how long the pauses of a tenant's sessions are, and when an idle session comes back if they are chance.

Pauses are counted by octaves of their ratio to the pause that was expected of their session. If these counts are those
of exponential pauses with one mean for all sessions, which is what agents have, the time for which a session has been
idle says nothing of the rest, and no more than that mean is needed. Otherwise the counts say it: if most pauses are
brief and the others long, a session that is idle for longer than the brief ones comes back late.

A session's expected pause lies between its tenant's mean and its own. The more a session's successive pauses are alike
among its tenant's, the more its own mean counts: prompts of which some are asked often have different means, and for
agents that all pause by the same chance the own mean is noise.

The order of what is kept is that of "LHD: improving cache hit rate by maximizing hit density", Beckmann, Chen and
Cidon, 2018: by the time in the tier for each return, for the most favourable time after which to give up.

Pure: no clock, no lock; all times are arguments, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_OWN_COUNTED = 4  # pauses of a session; its own mean follows the last ones
_COUNTED = 512  # pauses of a tenant; then older ones count half
_ERRORS = 2.5  # standard errors of the likeness of successive pauses, up to which it is taken for none
_LEAST_SECONDS = 0.01
_RENEWED_EACH = 16  # pauses
# Nothing is said of times within which fewer of the sessions that are as long idle came back.
_CAME_SHARE = 0.2
_LEAST_OCTAVE, _MOST_OCTAVE = -4, 6  # of a pause to the expected one; the first step is below, the last above
_BEGINS = [0.0, *(2.0**octave for octave in range(_LEAST_OCTAVE, _MOST_OCTAVE + 1))]
_ENDS = [*_BEGINS[1:], 4 * _BEGINS[-1]]
_STEPS = len(_BEGINS)
_LEAST_LEFT = 1e-4  # the share of pauses that are longer than any that was seen
_LEAST_SHARE = 0.01  # of exponential pauses in a step; steps with a lower one are compared together
# Chi-squared of 8 steps; 99.9 % of exponential pauses are below 26. The rest allows for expected pauses that were
# learned meanwhile. 272 pauses of two lengths reach 1,500.
_SQUARES_MAX = 40.0
_ASSUMED_PAUSES = 32.0  # exponential ones, before any was seen
_GEOMETRIC = 0.56  # the geometric mean of exponential pauses to their mean: e to the power of minus Euler's constant


def _step_of(ratio: float) -> int:
    step = math.frexp(ratio)[1] - _LEAST_OCTAVE
    return min(max(step, 0), _STEPS - 1)


def _exponential_shares(mean_ratio: float) -> list[float]:
    """Return the share of exponential pauses in each step.

    Args:
        mean_ratio: Their mean, as a ratio to the expected pause.
    """
    survive = [math.exp(-begin / mean_ratio) for begin in _BEGINS]
    return [begun - ended for begun, ended in zip(survive, [*survive[1:], 0.0], strict=True)]


@dataclass(slots=True, eq=False)
class OwnPauses:
    """The pauses of one session, by their logarithms. expected_seconds: the next one, as known at the last one."""

    count: int = 0
    mean: float = 0.0
    last: float = 0.0
    expected_seconds: float | None = None


class PauseLengths:
    """The pauses of a tenant's sessions.

    What follows from the counts is found out when it is asked for, and again after some pauses.

    Attributes:
        mean_seconds: Their geometric mean.
    """

    def __init__(self) -> None:
        self.mean_seconds = _LEAST_SECONDS
        self._counted = 0.0
        self._mean = 0.0  # of the logarithms, as the following
        self._squares = 0.0  # the sum of squared differences from the mean
        self._pairs = 0.0  # of successive pauses of one session
        self._products = 0.0  # the sum of the products of both differences from the mean
        self._counts = [_ASSUMED_PAUSES * share for share in _exponential_shares(1 / _GEOMETRIC)]  # by step
        self._ratios = [(begin + end) / 2 * n for begin, end, n in zip(_BEGINS, _ENDS, self._counts, strict=True)]
        self._until_renewed = 0  # pauses, until what follows is found out once more
        # Keyed by step of the time for which a session has been idle: the time until it comes back as a line (start,
        # slope), and the share of pauses that are longer than that, as a line too. Empty until they are asked for.
        self._lines: list[tuple[float, float, float, float]] = []
        self._is_exponential = True

    def add(self, own: OwnPauses, seconds: float) -> None:
        """Count a pause of the session that these are the pauses of."""
        seconds = max(seconds, _LEAST_SECONDS)
        length = math.log(seconds)
        if self._counted:
            ratio = seconds / (own.expected_seconds or self.mean_seconds)
            step = _step_of(ratio)
            self._counts[step] += 1.0
            self._ratios[step] += ratio
        self._counted += 1.0
        difference = length - self._mean
        self._mean += difference / self._counted
        self.mean_seconds = math.exp(self._mean)
        self._squares += difference * (length - self._mean)
        if own.count:
            self._pairs += 1.0
            self._products += (length - self._mean) * (own.last - self._mean)
        own.count = min(own.count + 1, _OWN_COUNTED)
        own.mean += (length - own.mean) / own.count
        own.last = length
        own.expected_seconds = self._expected_seconds(own)
        if self._counted >= _COUNTED:
            self._count_half()
        self._until_renewed -= 1

    def _count_half(self) -> None:
        self._counted /= 2
        self._squares /= 2
        self._pairs /= 2
        self._products /= 2
        self._counts = [count / 2 for count in self._counts]
        self._ratios = [ratio / 2 for ratio in self._ratios]

    def _expected_seconds(self, own: OwnPauses) -> float:
        """Return the geometric mean of the session's pauses, drawn to that of its tenant (Spearman and Brown)."""
        alike = self._likeness()
        share = own.count * alike / (1.0 + (own.count - 1) * alike)
        return math.exp(self._mean + share * (own.mean - self._mean))

    def _likeness(self) -> float:
        """The correlation of a session's successive pauses. 0: they differ as those of two sessions do, 1: they are
        equal."""
        if not self._pairs or self._squares <= 0:
            return 0.0
        correlation = self._products / self._pairs * self._counted / self._squares
        noise = _ERRORS / math.sqrt(self._pairs + _ERRORS * _ERRORS)
        return min(1.0, max(0.0, (correlation - noise) / (1.0 - noise)))

    def return_seconds(self, own: OwnPauses, idle_seconds: float, ended: float) -> float:
        """Return the time in the tier for each return of a session that has been idle for so long.

        Args:
            ended: How many of the tenant's sessions ended for each pause. The longer a session has been idle, the
                likelier it is one of them.
        """
        self._renew()
        if not self._lines:
            self._draw_lines()
        expected = own.expected_seconds or self.mean_seconds
        ratio = idle_seconds / expected
        step = math.frexp(ratio)[1] - _LEAST_OCTAVE if ratio else 0
        rest, rest_slope, left, left_slope = self._lines[step if 0 <= step < _STEPS else 0 if step < 0 else -1]
        return expected * (rest + rest_slope * ratio) * (1.0 + ended / (left + left_slope * ratio))

    def _squares_from_exponential(self) -> float:
        """Return Pearson's chi-squared of the counts beside those of exponential pauses with the same mean."""
        total = sum(self._counts)
        shares = _exponential_shares(sum(self._ratios) / total)
        squares = rest = rest_share = 0.0
        for share, count in zip(shares, self._counts, strict=True):
            if share < _LEAST_SHARE:
                rest, rest_share = rest + count, rest_share + share
            else:
                squares += (count - total * share) ** 2 / (total * share)
        return squares + (rest - total * rest_share) ** 2 / (total * rest_share + 1.0)

    @property
    def is_exponential(self) -> bool:
        """Whether chance alone tells them from exponential pauses with one mean for all sessions."""
        self._renew()
        return self._is_exponential

    def _renew(self) -> None:
        if self._until_renewed <= 0:
            self._until_renewed = _RENEWED_EACH
            self._is_exponential = not self._likeness() and self._squares_from_exponential() < _SQUARES_MAX
            self._lines.clear()

    def _draw_lines(self) -> None:
        rests, lefts = [], []
        total = left = sum(self._counts)
        for step, begin in enumerate(_BEGINS):
            best, came, waited = math.inf, 0.0, 0.0
            for count, ratios, end in zip(self._counts[step:], self._ratios[step:], _ENDS[step:], strict=True):
                came += count
                waited += ratios - count * begin
                if came > _CAME_SHARE * left:
                    best = min(best, (waited + max(0.0, left - came) * (end - begin)) / came)
            rests.append(best if best < math.inf else 2.0 * begin)
            lefts.append(max(left / total, _LEAST_LEFT))
            left -= self._counts[step]
        for step, (begin, end) in enumerate(zip(_BEGINS, _ENDS, strict=True)):
            is_last = step == _STEPS - 1
            rest_slope = rests[-1] / begin if is_last else (rests[step + 1] - rests[step]) / (end - begin)
            left_slope = 0.0 if is_last else (lefts[step + 1] - lefts[step]) / (end - begin)
            self._lines.append(
                (rests[step] - rest_slope * begin, rest_slope, lefts[step] - left_slope * begin, left_slope)
            )
