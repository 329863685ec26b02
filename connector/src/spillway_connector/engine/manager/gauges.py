"""The gauges of a tiering manager and its CPU tier, which are read once for the statistics of a step."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.samples import Gauges, Samples, sample_key
from spillway_connector.plan.answers import AnswerReuse
from spillway_connector.plan.load_cost import Gate, RateMeter

_USED, _TOTAL, _RETAINED, _WAITING = (
    sample_key(metrics.CPU_TIER_BLOCKS, state) for state in ("used", "total", "retained", "waiting")
)
_HELD, _JOINED, _PREFILL_RATE = map(sample_key, (metrics.HELD_BLOCKS, metrics.CPU_TIER_JOINED, metrics.PREFILL_RATE))
_ANSWERS_KEPT, _SENT_BACK = map(sample_key, (metrics.ANSWERS_KEPT, metrics.ANSWERS_SENT_BACK))


class ManagerGauges:
    """Adds what has changed since it was added last, and each time whether loads pay.

    Args:
        rows: The number of the CPU tier's rows.
        gates: The gates of the shared tiers.
    """

    def __init__(
        self, tier: CpuTier, rows: int, prefill_rate: RateMeter, gates: Mapping[SecondaryTierManager, Gate]
    ) -> None:
        self._tier, self._rows, self._prefill_rate = tier, rows, prefill_rate
        self._gates = [(each.tier_type, gate) for each, gate in gates.items()]
        self._gauges = Gauges(_HELD)

    def add_to(self, stats: Samples, answers: AnswerReuse | None) -> None:
        tier = self._tier
        values: dict[str, float | None] = {
            _USED: tier.used_rows(),
            _TOTAL: self._rows,
            _RETAINED: tier.retained_rows(),
            _WAITING: tier.waiting.kept_count,
            _HELD: tier.held_rows(),
            _PREFILL_RATE: self._prefill_rate.per_second,
        }
        if answers is not None:
            values[_ANSWERS_KEPT], values[_SENT_BACK] = int(answers.keeps), answers.sent_back_share
        if (joined := tier.is_joined) is not None:
            values[_JOINED] = int(joined)
            if not joined:  # each time, because statistics may be lost
                stats.add(metrics.CPU_TIER_JOINED, 0)
        self._gauges.add(stats, values)
        samples = stats.samples()
        for tier_type, gate in self._gates:
            for name, load_rate, pays in gate.readings(tier_type, self._prefill_rate):
                if load_rate is not None:
                    samples[sample_key(metrics.TIER_LOAD_RATE, name)] = load_rate
                samples[sample_key(metrics.TIER_LOADS_PAY, name)] = float(pays)
        if ended := tier.take_ended_sessions():
            stats.add(metrics.CPU_TIER_SESSIONS_ENDED, ended)
