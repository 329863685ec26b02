"""The drafter that speculative decoding is asked for, and the layers that it adds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spillway_engine.drafters import Drafter, drafter_of, with_drafter
from spillway_engine.model_shape import ModelShape, load_model_shape, read_model_shape

SHAPE = ModelShape(36, 8, 128, None, "bfloat16", None, 0)


@pytest.mark.parametrize(
    ("arguments", "drafter"),
    [
        ([], None),
        (["--max-num-seqs", "8"], None),
        (['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'], Drafter("ngram")),
        (["--speculative_config", '{"method": "eagle3", "model": "acme/d"}'], Drafter("eagle3", "acme/d")),
        (["-sc", '{"model": "acme/d"}'], Drafter("", "acme/d")),
        (["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens=1"], Drafter("mtp")),
        (["--spec-method=eagle", "--spec-model", "acme/d"], Drafter("eagle", "acme/d")),
        (["--spec-method=eagle", "--spec-method=ngram"], Drafter("ngram")),
        (["-sc", '{"method": "eagle"}', '--speculative-config={"method": "ngram"}'], Drafter("ngram")),
        (['--speculative-config={"method": "ngram"}', "-sc", '{"method": "eagle"}'], Drafter("eagle")),
        (["-sc.method=eagle3", "-sc.model", "acme/d"], Drafter("eagle3", "acme/d")),
        (["--speculative-config=no JSON"], Drafter()),
        (["--speculative-config=[1]"], Drafter()),
        (["--speculative-config=" + "[" * 100_000], Drafter()),
    ],
)
def test_what_arguments_ask_for(arguments: list[str], drafter: Drafter | None) -> None:
    assert drafter_of(arguments) == drafter


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"method": "ngram"}, 0),
        ({"method": "suffix"}, 0),
        ({"method": "eagle"}, 1),
        ({"method": "eagle3", "model": "acme/d"}, 1),
        ({"model": "acme/Qwen3-EAGLE3"}, 1),
        ({"method": "mtp"}, 2),
        ({"method": "qwen3_next_mtp"}, 2),
        ({"method": "dspark"}, 3),
        ({"model": "acme/dspark_qwen3_8b"}, 3),
        ({"method": "dflash", "model": "acme/d"}, 1),
        ({"method": "draft_model", "model": "acme/d"}, 0),  # whose layers only its config.json has
    ],
)
def test_how_many_layers_a_method_adds(config: dict[str, str], layers: int) -> None:
    model = {"num_hidden_layers": 36, "num_attention_heads": 8, "head_dim": 128, "num_nextn_predict_layers": 2}
    shape = with_drafter(read_model_shape(model), [f"--speculative-config={json.dumps(config)}"])
    assert (shape.speculates, shape.draft_layers, shape.layers) == (True, layers, 36)


def test_a_folder_says_how_many_layers_its_model_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 3, "num_attention_heads": 12, "head_dim": 128})  # half as large again
    )
    asked = ["--speculative-config", json.dumps({"model": str(tmp_path)})]
    assert with_drafter(SHAPE, asked).draft_layers == 5  # 4.5, and no row may be too small
    assert with_drafter(SHAPE, asked, layers=7).draft_layers == 7


@pytest.mark.parametrize(("method", "layers"), [("mtp", 2), ("deepseek_mtp", 2), ("dspark", 3), ("draft_model", 36)])
def test_the_model_s_own_folder_holds_its_layers_for_later_tokens(tmp_path: Path, method: str, layers: int) -> None:
    model = {"num_hidden_layers": 36, "num_attention_heads": 8, "head_dim": 128, "num_nextn_predict_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    asked = ["--speculative-config", json.dumps({"method": method, "model": str(tmp_path)})]
    assert with_drafter(load_model_shape(str(tmp_path)), asked).draft_layers == layers


@pytest.mark.parametrize("method", ["dspark", "dflash", "mtp"])
def test_a_drafter_of_another_size_is_counted_by_its_folder(tmp_path: Path, method: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 5, "num_attention_heads": 8, "head_dim": 128})
    )
    asked = ["--speculative-config", json.dumps({"method": method, "model": str(tmp_path)})]
    assert with_drafter(SHAPE, asked).draft_layers == 5


@pytest.mark.parametrize(
    ("drafter", "is_counted"),
    [
        (Drafter("dspark"), True),
        (Drafter("dspark", "acme/d"), False),
        (Drafter("dflash", "acme/d"), False),
        (Drafter("draft_model", "acme/d"), False),
        (Drafter("", "acme/d"), False),
        (Drafter("", "acme/EAGLE3-d"), True),
        (Drafter("eagle3", "acme/d"), True),
        (Drafter("mtp", "acme/d"), True),
        (Drafter("medusa", "acme/d"), True),
        (Drafter("ngram"), True),
    ],
)
def test_which_drafters_have_layers_that_only_their_config_json_counts(drafter: Drafter, is_counted: bool) -> None:
    assert drafter.is_counted is is_counted


def test_layers_of_a_drafter_see_the_whole_prompt() -> None:
    asked = ["--speculative-config", '{"method": "eagle"}']
    alone = replace(SHAPE, layers=12, sliding_layers=6, window_tokens=64)
    both = with_drafter(alone, asked)
    assert [(shape.kv_groups, shape.group_layers) for shape in (alone, both)] == [(2, 6), (2, 7)]
    assert with_drafter(SHAPE, []) == SHAPE


@pytest.mark.parametrize("config", [None, "no JSON", '{"model_type": "medusa", "num_heads": 5}', '{"n_predict": 3}'])
def test_a_drafter_without_attention_adds_no_layers(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert with_drafter(SHAPE, [f"--spec-model={tmp_path}", "--spec-method=medusa"]).draft_layers == 0


def test_a_name_that_no_file_system_takes_is_no_folder() -> None:
    assert with_drafter(SHAPE, ["--spec-method=eagle", f"--spec-model=/{'x' * 5000}"]).draft_layers == 1


@pytest.mark.parametrize("given", ["x", [1], -3, 0, None])
def test_a_number_of_own_layers_that_is_none_counts_as_one(given: object) -> None:
    model = {"num_hidden_layers": 36, "num_attention_heads": 8, "head_dim": 128, "num_nextn_predict_layers": given}
    assert read_model_shape(model).own_draft_layers == 1
