"""The types of Kubernetes that the chart judges values by are those of the newest version."""

import os

from chart.kubernetes_types import PROSE, kubernetes_types
from chart.rendering import CHART

FILE = CHART / "files" / "kubernetes-types.json"


def test_the_file_is_what_the_newest_kubernetes_makes_of_it() -> None:
    made = kubernetes_types()
    if os.environ.get("UPDATE_GOLDEN"):
        FILE.write_text(made)

    assert FILE.read_text() == made


def test_prose_is_about_fields_that_there_are() -> None:
    made = kubernetes_types()

    for place in PROSE:
        name, _, field = place.partition(".")
        line = next(line for line in made.splitlines() if line.startswith(f'  "{name}": '))
        assert not field or f'"{field}": {{' in line, place
