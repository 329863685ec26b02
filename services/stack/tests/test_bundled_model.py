import re
import subprocess
import sys
from pathlib import Path

import pytest

from spillway_engine.reference_likelihood import MODEL_FILE, REFERENCES
from spillway_stack import bundled_model
from spillway_stack.bundled_model import SERVED_NAME, choose_model, models_folder, prepare, prepared_folder
from spillway_stack.errors import StackError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_named_after_the_content(cache: Path) -> None:
    folder = prepared_folder()

    assert folder.parent == cache / "spillway" / "models" == models_folder()
    name, digest, recipe = folder.name.rsplit("-", 2)
    assert name == SERVED_NAME
    assert re.fullmatch("[0-9a-f]{12}", digest)
    assert recipe.isdigit()


def test_the_start_up_check_has_a_reference_for_it() -> None:
    assert prepared_folder().name in REFERENCES
    assert bundled_model.MODEL_FILE == MODEL_FILE


def test_a_prepared_model_is_used_as_it_is() -> None:
    prepared_folder().mkdir(parents=True)
    messages: list[str] = []

    assert choose_model("", messages.append).folder == str(prepared_folder())
    assert messages == []


def test_a_failed_conversion_leaves_nothing_and_reports_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    monkeypatch.setattr(bundled_model, "_source", lambda: (broken, "0" * 64))

    with pytest.raises(StackError, match=r"the bundled model could not be prepared(.|\n)*Error"):
        prepare(lambda line: None)

    assert list(models_folder().iterdir()) == []


def test_a_folder_is_taken_with_its_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    with pytest.raises(StackError, match=r"has no config\.json"):
        choose_model(str(folder), print)
    (folder / "config.json").write_text("{}")
    without = choose_model(str(folder), print)
    (folder / "tokenizer.json").write_text("{}")
    model = choose_model(str(folder), print)

    assert (model.folder, model.served_name, model.bundled, model.tokenizer) == (
        str(folder),
        "my-model",
        False,
        str(folder),
    )
    assert without.tokenizer is None


def test_hub_names_pass_and_missing_folders_do_not() -> None:
    assert choose_model("Owner/Some-Model", print).served_name == "some-model"
    with pytest.raises(StackError, match="is no folder"):
        choose_model("/no/such/model", print)


def test_the_engine_image_prepares_it_with_no_other_distribution() -> None:
    others = ("spillway_connector", "spillway_ctl", "spillway_engine", "spillway_gateway", "spillway_settings")
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in others)
    code = f"import sys; {blocked}import spillway_stack.bundled_model"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
