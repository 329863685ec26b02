"""The checks of `spillway check`, in this order: the schema, the cluster's version, sizes, and the rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spillway_ctl.check.ascend_rules import ascend_findings
from spillway_ctl.check.auth_rules import auth_findings
from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.container_rules import container_findings
from spillway_ctl.check.credential_rules import credential_findings
from spillway_ctl.check.device_rules import device_findings
from spillway_ctl.check.duration_rules import duration_findings
from spillway_ctl.check.engine_rules import engine_findings
from spillway_ctl.check.finding import Finding
from spillway_ctl.check.gateway_rules import gateway_findings
from spillway_ctl.check.group import Release, group_of
from spillway_ctl.check.model_rules import model_findings
from spillway_ctl.check.node_group_rules import node_group_findings
from spillway_ctl.check.node_rules import node_findings
from spillway_ctl.check.pod_rules import pod_findings
from spillway_ctl.check.release_rules import release_findings
from spillway_ctl.check.route_rules import route_findings
from spillway_ctl.check.shape import shape_findings
from spillway_ctl.check.size_rules import size_findings
from spillway_ctl.check.tier_rules import tier_findings
from spillway_ctl.check.typed_values import engine_groups, global_settings, laid_out, missing_defaults, too_new, typed
from spillway_ctl.check.unread_rules import unread_findings

_GROUP_RULES = (engine_findings, tier_findings, model_findings, node_group_findings)
_RELEASE_RULES = (
    release_findings,
    node_findings,
    gateway_findings,
    duration_findings,
    auth_findings,
    unread_findings,
    credential_findings,
    pod_findings,
    container_findings,
    route_findings,
    ascend_findings,
)


def findings(given: Mapping[str, Any], cluster: Cluster) -> list[Finding]:
    """Everything that is wrong with the values; empty: they are right.

    If keys, types or sizes are wrong, only these are yielded: nothing can be concluded from such values.

    Args:
        given: what was written over the chart's defaults; null removes a default.
        cluster: what is known of the cluster and the release.
    """
    if wrong := shape_findings(given):
        return wrong
    tree = laid_out(given)
    if wrong := [*global_settings(given, cluster), *missing_defaults(tree), *too_new(tree, cluster)]:
        return wrong
    values, engines = typed(tree), engine_groups(tree)
    if wrong := list(size_findings(values, engines)):
        return wrong
    found: list[Finding] = []
    groups = []
    for key, engine in engines.items():
        group, of_memory = group_of(key, engine, values, cluster)
        groups.append(group)
        found += of_memory
    release = Release(values, tuple(groups), cluster, tree, dict(given))
    for group in groups:
        found += device_findings(group)
        for group_rule in _GROUP_RULES:
            found += group_rule(group, release)
    for release_rule in _RELEASE_RULES:
        found += release_rule(release)
    return list(dict.fromkeys(found))
