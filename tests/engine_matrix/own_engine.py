"""An engine of this process, which ends so that the next one can start."""

from __future__ import annotations

import gc
import json
from typing import Any

_TOP_TOKENS = 20


class OwnEngine:
    """settings: of vllm.LLM."""

    def __init__(self, **settings: Any) -> None:
        from vllm import LLM

        self.llm = LLM(**settings)

    @property
    def connector(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector

    def ask(self, question: str, prompt: list[int], **options: Any) -> None:
        """Print how likely the likely first tokens are, and the cached tokens. options: of LLM.generate."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, logprobs=_TOP_TOKENS)
        (answer,) = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False, **options)
        logprobs = {str(token): one.logprob for token, one in answer.outputs[0].logprobs[0].items()}
        run = {"question": question, "cached": answer.num_cached_tokens or 0, "logprobs": logprobs}
        print("RUN", json.dumps(run), flush=True)

    def end(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        ensure_kv_transfer_shutdown()  # a worker of this process would find the last engine's connector
        cleanup_dist_env_and_memory()
