"""A load split by layers: which copies each group of neighbouring layers needs before its attention can run.

Pure arithmetic. One copy and one event for each layer would delay the start of the forward by their submission, so
neighbours share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spillway_connector.plan.copies import CopyLayout

GROUPS_MAX = 16  # copies of a load; a model of 40 layers has three layers a group


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """layouts: The layout of each group, in the order of the layers. group_of: The index into `layouts` for each
    layer's name."""

    layouts: tuple[CopyLayout, ...]
    group_of: Mapping[str, int]


def group_layers(
    layout: CopyLayout, layers: Sequence[str], segments_of: Sequence[int], groups_max: int = GROUPS_MAX
) -> LayerGroups:
    """Split the segments of a layout with one cache group.

    layers: names, in the order of the forward. segments_of: how many segments each of them has, one layer's behind the
    other's. If that is not how the segments lie, all layers are one group.
    """
    (segments,) = layout.groups
    if sum(segments_of) != len(segments):
        return LayerGroups((layout,), dict.fromkeys(layers, 0))
    layers_each = max(1, -(-len(layers) // groups_max))
    layouts: list[CopyLayout] = []
    group_of: dict[str, int] = {}
    begin = 0
    for first in range(0, len(layers), layers_each):
        end = begin + sum(segments_of[first : first + layers_each])
        group_of.update(dict.fromkeys(layers[first : first + layers_each], len(layouts)))
        layouts.append(replace(layout, groups=(segments[begin:end],)))
        begin = end
    return LayerGroups(tuple(layouts), group_of)
