"""Turns samples into rows, and writes the rows to build/demo/report.json. Pure except for the write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from spillway_settings.wire import OWN_HEADERS_PREFIX
from spillway_stack.demo.phases import MIXED, Phase, Sample
from spillway_stack.demo.sizing import EngineLimits
from spillway_stack.state_folder import write_json

NEAR_TIE = 1.0  # natural logarithm: a margin that bfloat16 may reverse, logits between 16 and 32 lying 0.125 apart
COLD_REFERENCE, DEVICE_REFERENCE = "cold", "device hit"


@dataclass(frozen=True, slots=True)
class Row:
    """One phase; figures are medians over the documents. The first eight keys are stable."""

    phase: str
    engine: str
    tier: str  # where it was served from: none, device, cpu, nvme, redis, mixed
    prompt_tokens: int
    cached_tokens: int
    ttft_seconds: float
    ratio_to_recompute: float  # how many times faster than the cold phase
    identical: bool  # token for token, to `reference`
    reference: str  # the answer compared with: "cold", or "device hit" if that one rounds differently from cold
    identical_to_cold: bool
    differs_by_rounding: bool  # from `reference`, and only from a token on that was a near tie
    served_as_planned: bool
    notes: tuple[str, ...]  # what was not as planned, one line per document
    ttft_seconds_samples: tuple[float, ...]
    answers: tuple[str, ...]
    headers: dict[str, str]  # the gateway's, of the last answer

    @property
    def is_proven(self) -> bool:
        """A device hit that differs only from cold is rounding, and so is a near tie that went the other way; both are
        reported. Anything else is a fault."""
        rounding = self.differs_by_rounding or self.phase == Phase.DEVICE_HIT.value
        return self.served_as_planned and (self.identical or rounding)


def summarise(samples: Sequence[Sample], everything: Sequence[Sample], limits: EngineLimits, shared_tier: str) -> Row:
    """Return the row of one phase's `samples`. `everything` so far holds the references, these samples included.

    Every document's answer is compared with its cold one. A full prefill multiplies matrices of other shapes than the
    short rest after a hit, and a kernel may then round differently; if that already makes a document's device hit
    differ from cold, its tier hits are compared with its device hit, the computation of equal length.
    """
    phase = samples[0].phase
    cold = {sample.document: sample for sample in everything if sample.phase is Phase.COLD}
    # The first device hit is on the same engine that computed the prefix: no tier took part in it.
    device = {sample.document: sample for sample in everything if sample.phase is Phase.DEVICE_HIT}
    identical_to_cold = all(_same(sample, cold[sample.document]) for sample in samples)
    reference = COLD_REFERENCE
    identical = identical_to_cold
    if not identical_to_cold and phase not in (Phase.COLD, Phase.DEVICE_HIT):
        reference = DEVICE_REFERENCE
        identical = all(_same(sample, device[sample.document]) for sample in samples)
    references = cold if reference == COLD_REFERENCE else device
    by_rounding = not identical and all(
        _same_but_for_rounding(sample, references[sample.document]) for sample in samples
    )
    faults = [(sample, sample.fault(limits, shared_tier)) for sample in samples]
    tiers = {sample.served.tier for sample in samples}
    ttft_seconds = median(sample.answer.ttft_seconds for sample in samples)
    recompute_seconds = median(sample.answer.ttft_seconds for sample in cold.values())
    return Row(
        phase=phase.value,
        engine=", ".join(sorted({sample.engine for sample in samples})),
        tier=tiers.pop() if len(tiers) == 1 else MIXED,
        prompt_tokens=round(median(sample.answer.prompt_tokens for sample in samples)),
        cached_tokens=round(median(sample.answer.cached_tokens for sample in samples)),
        ttft_seconds=round(ttft_seconds, 4),
        ratio_to_recompute=round(recompute_seconds / ttft_seconds, 2),
        identical=identical,
        reference=reference,
        identical_to_cold=identical_to_cold,
        differs_by_rounding=by_rounding,
        served_as_planned=all(fault is None for _, fault in faults),
        notes=tuple(f"document {sample.document + 1}: {fault}" for sample, fault in faults if fault is not None),
        ttft_seconds_samples=tuple(round(sample.answer.ttft_seconds, 4) for sample in samples),
        answers=tuple(sample.answer.text.strip() for sample in samples),
        headers={
            name: value for name, value in samples[-1].answer.headers.items() if name.startswith(OWN_HEADERS_PREFIX)
        },
    )


def write_report(rows: Sequence[Row], path: Path) -> None:
    """Write the report atomically: an interrupted demo keeps the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [asdict(row) for row in rows])


def _same(sample: Sample, reference: Sample) -> bool:
    return sample.answer.token_ids == reference.answer.token_ids


def _same_but_for_rounding(sample: Sample, reference: Sample) -> bool:
    """Whether two answers are equal up to a token that leads its runner-up by little in one of them."""
    answers = sample.answer, reference.answer
    for position, (token, its) in enumerate(zip(*(answer.token_ids for answer in answers), strict=False)):
        if token != its:
            return any(answer.leads[position] < NEAR_TIE for answer in answers if answer.leads)
    return _same(sample, reference)
