"""The facts that rules use: those that the chart's templates share are in the chart, the others in `facts` beside this
module.

`chart` beside this module is a link to the chart; a built package holds what it leads to.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import yaml

from spillway_settings.shared_names import CUSTOM_KINDS

CHART = Path(__file__).with_name("chart")
OWN = Path(__file__).with_name("facts")


class Cluster(msgspec.Struct, frozen=True):
    """The known facts of the cluster and of the release.

    Attributes:
        kubernetes: major and minor version; None: not known, so that nothing is refused for it.
        kinds: API version and kind of what is installed there, such as `keda.sh/v1alpha1/ScaledObject`; without a
            cluster, what somebody may install is taken to be there.
        release: name of the release, which begins the objects' names.
        namespace: the release's namespace.
        is_root: whether the chart is installed by itself, not as a part of another chart.
    """

    kubernetes: tuple[int, int] | None = None
    kinds: frozenset[str] = frozenset(CUSTOM_KINDS)
    release: str = "chat"
    namespace: str = "default"
    is_root: bool = True

    @property
    def version(self) -> str:
        return ".".join(map(str, self.kubernetes or ()))

    def is_before(self, version: str) -> bool:
        """Whether the cluster is known to be older than `1.35`, for example."""
        major, minor = version.split(".")
        return self.kubernetes is not None and self.kubernetes < (int(major), int(minor))


@cache
def facts(name: str) -> Any:
    """The content of a file of facts; it is cached, so callers must not change it."""
    file = OWN / name
    shared = CHART / "files" / name
    return yaml.load((file if file.exists() else shared).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


@cache  # msgspec evaluates a struct's annotations each time
def fields_of(section: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(section)


@cache
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return loaded
