"""Names stay within Kubernetes' limits and apart from each other, and no two sides spell one for themselves."""

import re

import pytest
from chart.rendering import CHART, RenderRefused, render
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes.rules import ROOT
from repository.tracked import tracked_files

from spillway_ctl.check.engine_rules import OWN_VARIABLES
from spillway_settings.shared_names import CUSTOM_KINDS, FOLDERS, VARIABLES

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
words = st.from_regex(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", fullmatch=True)
keys = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?", fullmatch=True)


@settings(max_examples=20, deadline=None)
@given(release=words, override=st.one_of(st.just(""), words), models=st.sets(keys, min_size=1, max_size=4))
def test_names_fit_and_differ(release, override, models):
    values = {
        "fullnameOverride": override,
        "engine": {"offload": {"sharedTier": {"type": "redis"}}, "replicas": 12},
        "redis": {"enabled": True},
        "gateway": {"resources": {"limits": {"memory": "4GiB"}}},  # of four models
        "engines": {key: {"model": {"servedName": f"model-{key}"}} for key in models},
    }

    rendered = render(values=values, release=release)

    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(set(names)) == len(names)
    for item in rendered.objects:
        assert DNS_LABEL.fullmatch(item["metadata"]["name"]), item["metadata"]["name"]
        for value in item["metadata"]["labels"].values():
            assert LABEL_VALUE.fullmatch(value)
    for item in rendered.of_kind("StatefulSet"):
        # Kubernetes' own label on its pods is this name, a dash and ten digits; pods are the name, a dash and a number.
        assert len(item["metadata"]["name"]) <= 52
        assert item["spec"]["serviceName"] in [name for kind, name in names if kind == "Service"]


@pytest.mark.parametrize("release", ["my.chat", "team.a.spillway"])
def test_a_release_with_a_dot_needs_a_name_without(release):
    """Helm takes it, and the API server takes no such Service, so that an install would end half way."""
    with pytest.raises(RenderRefused, match=r"no dot; set fullnameOverride, e\.g\. [a-z-]+\n") as refused:
        render(release=release)

    advised = str(refused.value).partition("set fullnameOverride, e.g. ")[2].split()[0]
    rendered = render(release=release, values={"fullnameOverride": advised})
    assert all(DNS_LABEL.fullmatch(item["metadata"]["name"]) for item in rendered.objects)


SPELLED = re.compile("|".join([*FOLDERS.values(), *VARIABLES.values()]))
ENDINGS = (".tpl", ".yaml", ".txt", ".py")
START_SCRIPT = CHART / "files" / "start-ascend.sh"


def test_templates_and_rules_spell_no_folder_and_no_variable_a_second_time() -> None:
    parts = ("charts/spillway/templates/", "services/ctl/src/spillway_ctl/check/", "services/engine/src/")
    files = [ROOT / path for path in tracked_files() if path.startswith(parts) and path.endswith(ENDINGS)]

    assert len(files) > 80
    assert {file.name: found for file in files if (found := SPELLED.findall(file.read_text()))} == {}
    assert set(re.findall(r"\bSPILLWAY_[A-Z_]+", START_SCRIPT.read_text())) == {VARIABLES["visibleDevices"]}


def test_kinds_of_other_projects_are_listed_once() -> None:
    listing = [path for path in tracked_files() if path.endswith(".py") and "/src/" in path]

    texts = {path: (ROOT / path).read_text() for path in listing}
    assert [path for path, text in texts.items() if all(kind in text for kind in CUSTOM_KINDS)] == [
        "settings/src/spillway_settings/shared_names.py"
    ]


def test_an_engine_has_the_variables_that_values_may_not_give() -> None:
    values = {
        "engine": {
            "apiKeySecret": {"name": "k"},
            "model": {"hubTokenSecret": {"name": "k"}},
            "offload": {
                "sharedTier": {
                    "type": "redis",
                    "redis": {
                        "url": "redis://a",
                        "existingSecret": {"name": "k", "usernameKey": "u", "passwordAs": "env"},
                    },
                }
            },
        },
        "gateway": {
            "auth": {"keysSecret": {"name": "g"}, "saltSecret": {"name": "s"}, "engineKeySecret": {"name": "k"}},
        },
    }

    [container] = render(values=values).one("StatefulSet", "engine")["spec"]["template"]["spec"]["containers"]
    of_the_preset = {"OMP_PROC_BIND", "PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE"}
    assert {variable["name"] for variable in container["env"]} - of_the_preset == set(OWN_VARIABLES)
