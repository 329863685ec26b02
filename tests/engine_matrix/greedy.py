"""One engine of this process, asked one prompt after the other, and shut down so that the next one can start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from reference_answers.margins import TOP, Scored

from engine_matrix.own_engine import OwnEngine


def greedy_answers(
    settings: dict[str, Any], prompts: Callable[[int], Iterable[list[int]]], answer_tokens: int
) -> dict[str, list[Any]]:
    """Tokens of each answer, how likely the likely ones were at each position (as reference_answers.margins.Scored, fit
    for JSON), and how many tokens of its prompt came from a cache.

    settings: of vllm.LLM. prompts: from the tokens of a block, which vLLM may have made larger than was asked.
    """
    from vllm import SamplingParams

    engine = OwnEngine(**settings)
    try:
        greedy = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False, logprobs=TOP
        )
        tokens, tops, cached = [], [], []
        for prompt in prompts(engine.llm.llm_engine.vllm_config.cache_config.block_size):
            (answer,) = engine.llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
            (output,) = answer.outputs
            tokens.append(list(output.token_ids))
            tops.append([{token: seen.logprob for token, seen in position.items()} for position in output.logprobs])
            cached.append(answer.num_cached_tokens or 0)
        return {"tokens": tokens, "tops": tops, "cached": cached}
    finally:
        engine.end()


def scored_answers(run: dict[str, list[Any]]) -> list[Scored]:
    """The answers of a run, which may have been JSON in between: its keys are text."""
    answers = zip(run["tokens"], run["tops"], strict=True)
    return [Scored.from_json({"tokens": tokens, "tops": tops}) for tokens, tops in answers]
