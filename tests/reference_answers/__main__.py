"""`PYTHONPATH=tests python -m reference_answers`: measures all questions and writes questions.json."""

from __future__ import annotations

import argparse

import transformers

from spillway_stack.bundled_model import prepare

from .float32 import measure
from .questions import QUESTIONS, write_record

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="reference_answers", description="Measures the answers in questions.json again."
    ).parse_args()
    folder = prepare(print)
    measured = measure(folder, QUESTIONS)
    write_record(measured, f"{folder.name}, float32, transformers {transformers.__version__}")
    for one in measured:
        print(f"{one.question!r} -> {one.answer!r}: least margin {min(one.margins):.3f}")
