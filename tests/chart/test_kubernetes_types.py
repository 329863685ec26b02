"""The types of Kubernetes that values are judged by are those of the newest version."""

import os

from chart.helm_binaries import ROOT
from chart.kubernetes_types import PROSE, kubernetes_types

FILE = ROOT / "settings" / "src" / "spillway_settings" / "values" / "kubernetes.json"


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
