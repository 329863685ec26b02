"""vLLM 0.33 on the signatures of its wheel: supported, and refused by name once one has changed."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spillway_connector.engine import generation as probes
from spillway_connector.engine.generation import SUPPORTED, Generation, Methods, Seams, generation, require
from spillway_connector.engine.v030.seams import SEAMS
from spillway_connector.errors import UnsupportedEngine
from vllm_signatures.read import Sample, read

SAMPLE = Path(__file__).parent / "samples" / "vllm-0.33.0.json"


@pytest.fixture
def sample() -> Sample:
    return Sample(**json.loads(SAMPLE.read_text()))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sample], None]:
    """Puts modules with a sample's classes where vLLM's are imported from."""

    def place(sample: Sample) -> None:
        for module, names in sample.names.items():
            for name in names:
                setattr(_module(monkeypatch, module), name, type(name, (), {}))
        for module, classes in sample.methods.items():
            for cls, methods in classes.items():
                members = {name: _method(parameters) for name, parameters in methods.items()}
                setattr(_module(monkeypatch, module), cls, type(cls, (), members))
        _module(monkeypatch, "vllm").__version__ = sample.vllm
        monkeypatch.setattr(probes, "_has_module", sample.features.__contains__)

    return place


def _module(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Put a stand-in and the packages above it into sys.modules until the test's end."""
    if not isinstance(sys.modules.get(name), _StandIn):
        monkeypatch.setitem(sys.modules, name, _StandIn(name))
        above, _, last = name.rpartition(".")
        if above:
            setattr(_module(monkeypatch, above), last, sys.modules[name])
    return sys.modules[name]


class _StandIn(ModuleType):
    """A module, or the package that it is in."""

    __path__ = ()  # type: ignore[assignment]


def _method(parameters: list[str]) -> Any:
    def method() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    method.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])  # type: ignore
    return method


def test_vllm_0_33_is_supported(sample: Sample, stand_in: Callable[[Sample], None]) -> None:
    stand_in(sample)
    assert generation.__wrapped__() is Generation.V030
    require(SEAMS)


def submit_load(sample: Sample) -> list[str]:
    return sample.methods["vllm.v1.kv_offload.base"]["OffloadingWorker"]["submit_load"]


def test_what_a_later_vllm_added_may_be_missing(sample: Sample, stand_in: Callable[[Sample], None]) -> None:
    """The parameter that is removed here is one that neither vLLM 0.30 nor 0.32 has."""
    submit_load(sample).remove("expedited")
    stand_in(sample)
    require(SEAMS)


def test_the_refusal_names_what_has_changed_and_what_to_run(sample: Sample, stand_in: Callable[[Sample], None]) -> None:
    submit_load(sample)[-1] = "urgent"
    stand_in(sample)
    with pytest.raises(UnsupportedEngine) as refused:
        require(SEAMS)
    assert str(refused.value) == (
        "vLLM 0.33.0 is not supported: OffloadingWorker.submit_load takes "
        "['self', 'job_id', 'src_spec', 'dst_spec', 'urgent'], not ['self', 'job_id', 'src_spec', 'dst_spec']; "
        f"run Spillway with {SUPPORTED}"
    )


@pytest.mark.parametrize("seam", SEAMS.methods, ids=lambda seam: seam.cls)
def test_each_seam_refuses_a_vllm_without_it(sample: Sample, stand_in: Callable[[Sample], None], seam: Methods) -> None:
    for parameters in sample.methods[seam.module][seam.cls].values():
        parameters.append("more")
    stand_in(sample)
    with pytest.raises(UnsupportedEngine, match=rf"{seam.cls}\.\w+ takes \[.*'more'\]"):
        require(SEAMS)


def test_signatures_are_read_through_bases_and_imports(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "base.py").write_text("class Base:\n    def far(self, a, /, *rest, b=1, **more): ...\n")
    (package / "own.py").write_text(
        "from vllm.base import Base\nTABLE = 1\nclass Own(Base):\n    def near(self, x: int): ...\n"
    )
    wanted = Methods("vllm.own", "Own", {"near": (), "far": (), "gone": ()})
    found = read(tmp_path, "1.2", Seams(names={"vllm.own": ("TABLE", "Own", "NO")}, methods=(wanted,)))
    assert found == Sample(
        "1.2",
        [],
        {"vllm.own": ["Own", "TABLE"]},
        {"vllm.own": {"Own": {"near": ["self", "x"], "far": ["self", "a", "rest", "b", "more"]}}},
    )
