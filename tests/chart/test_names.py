"""Names and labels stay within Kubernetes' limits and apart from each other, whatever the release is called."""

import re

import pytest
from chart.rendering import RenderRefused, render
from hypothesis import given, settings
from hypothesis import strategies as st

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
