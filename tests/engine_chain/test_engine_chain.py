"""A real engine whose working set is larger than its NVMe tier: another one finds all of it below."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_matrix.asked_engine import Answer, asked_engine
from reference_answers.margins import ROUNDING_OF_EQUALS, difference
from s3_servers import KEYS, s3_server
from stack_driver.deadlines import eventually

from engine_chain.chains import NVME_BYTES, PROMPT_BLOCKS, blocks_below, bytes_above, chained, prompt

PROMPTS = 4  # 48 blocks, of which the NVMe tier has room for 30


@pytest.mark.timeout(600)
def test_what_the_node_has_no_room_for_is_loaded_from_the_bucket_and_then_lies_on_the_other_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    with s3_server(tmp_path / "s3") as server:
        server.make_bucket()
        computed: list[Answer] = []
        with asked_engine(tmp_path, chained(tmp_path / "first", server)) as first:
            tokens = first.block_tokens
            prompts = [prompt(number, tokens) for number in range(PROMPTS)]
            for number, asked in enumerate(prompts):
                computed.append(first.ask(asked))
                assert computed[-1].cached == 0
                first.ask([3, number])  # stores are submitted with the step after their own
                eventually(
                    f"prompt {number} lies below",
                    lambda done=number + 1: blocks_below(server) >= done * PROMPT_BLOCKS,
                )
            assert bytes_above(tmp_path / "first") <= NVME_BYTES
            first.kill()
        with asked_engine(tmp_path, chained(tmp_path / "second", server)) as second:
            for asked, reference in zip(prompts, computed, strict=True):
                loaded = second.ask(asked)
                assert loaded.cached == PROMPT_BLOCKS * tokens
                assert difference(reference.scored, loaded.scored, ROUNDING_OF_EQUALS) is None
                second.ask([3, 3])
            # The last two prompts are in the NVMe tier now, whereas device and CPU tier hold little more than one.
            eventually("promoted", lambda: bytes_above(tmp_path / "second") > NVME_BYTES * 0.8)
            server.kill()
            again = second.ask(prompts[-2])
            assert again.cached == PROMPT_BLOCKS * tokens
            assert difference(computed[-2].scored, again.scored, ROUNDING_OF_EQUALS) is None
