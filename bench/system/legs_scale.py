"""Load on prefill and decode apart, for CPU and for CUDA engines: lengths, rates and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from system.legs_load import Kind


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths, rates and bounds for one sort of engines. turn: the first turn of a conversation; new: of the second."""

    long: Kind
    short: Kind
    mixed: tuple[float, float]  # rates of both kinds when they come together
    turn: Kind
    new_tokens: int
    conversations: int
    settle_seconds: float  # in which an answer's blocks reach the shared tier
    first_token_bound_seconds: float
    token_bound_seconds: float
    uncached_tokens_min: int
    killed_tokens: int  # of a prompt while engines are killed
    killed_request_seconds: float  # about what such a request takes
    request_seconds: float  # after which a request has failed, so that one that hangs costs no whole run

    def mixes(self) -> dict[str, tuple[Kind, ...]]:
        long, short = self.long, self.short
        return {
            "prefill_heavy": (long,),
            "decode_heavy": (short,),
            "mixed": (
                Kind(long.prompt_tokens, long.answer_tokens, self.mixed[0]),
                Kind(short.prompt_tokens, short.answer_tokens, self.mixed[1]),
            ),
        }


CUDA = Scale(
    long=Kind(8_192, 32, 2.5),
    short=Kind(256, 256, 12.0),
    mixed=(1.5, 8.0),
    turn=Kind(8_192, 300, 0.0),
    new_tokens=2_048,
    conversations=5,
    settle_seconds=0.5,
    first_token_bound_seconds=1.0,
    token_bound_seconds=0.025,
    uncached_tokens_min=1_024,
    killed_tokens=2_048,
    killed_request_seconds=0.4,
    request_seconds=45.0,
)
TINY = Scale(
    long=Kind(768, 4, 0.25),
    short=Kind(64, 24, 0.4),
    mixed=(0.15, 0.25),
    turn=Kind(512, 140, 0.0),
    new_tokens=384,
    conversations=1,
    settle_seconds=2.0,
    first_token_bound_seconds=8.0,
    token_bound_seconds=0.3,
    uncached_tokens_min=256,
    killed_tokens=384,
    killed_request_seconds=8.0,
    request_seconds=240.0,
)
