from __future__ import annotations

import numpy as np
import pytest

from spillway_connector.plan.copies import CopyLayout, Segment, plan_copies
from spillway_connector.plan.layer_groups import group_layers


def layout_of(segments: int) -> CopyLayout:
    each = [Segment(1_000_000 * (n + 1), 256, 64 * n, 64, 64) for n in range(segments)]
    return CopyLayout((tuple(each),), 1 << 30, 64 * segments, 1)


@pytest.mark.parametrize(("layers", "parts", "groups_max"), [(4, 1, 16), (40, 1, 16), (7, 2, 3), (1, 4, 16)])
def test_the_groups_hold_each_copy_of_the_load_once_in_the_order_of_the_layers(layers, parts, groups_max):
    names = [f"layers.{n}" for n in range(layers)]
    whole = layout_of(layers * parts)
    groups = group_layers(whole, names, [parts] * layers, groups_max)
    assert len(groups.layouts) <= groups_max
    assert [segment for layout in groups.layouts for segment in layout.groups[0]] == list(whole.groups[0])
    assert [groups.group_of[name] for name in names] == sorted(groups.group_of.values())
    for name, index in groups.group_of.items():
        at = names.index(name) * parts
        assert set(whole.groups[0][at : at + parts]) <= set(groups.layouts[index].groups[0])
    job = np.array([3, 5, 6]), [3], [0], np.array([2, 0, 1])
    by_group = [plan_copies(layout, *job) for layout in groups.layouts]
    assert sum(plan.total_bytes for plan in by_group) == plan_copies(whole, *job).total_bytes


def test_layers_of_different_sizes_keep_their_own_segments():
    groups = group_layers(layout_of(6), ["a", "b", "c"], [1, 3, 2], groups_max=3)
    assert [len(layout.groups[0]) for layout in groups.layouts] == [1, 3, 2]


def test_layers_whose_segments_are_unknown_are_one_group():
    whole = layout_of(1)  # one tensor holds all layers
    groups = group_layers(whole, ["a", "b", "c"], [1, 1, 1])
    assert groups.layouts == (whole,)
    assert groups.group_of == {"a": 0, "b": 0, "c": 0}
