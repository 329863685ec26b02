"""The shares of file descriptors."""

from __future__ import annotations

from spillway_gateway.client.descriptors import PER_ENGINE, RESERVED, SHARE_MIN, UNLIMITED, DescriptorShares, shares


def test_with_enough_descriptors_each_side_gets_what_is_set() -> None:
    assert shares(UNLIMITED, 8192, 4096, 100) == DescriptorShares(8192, 4096)
    assert shares(8192 + 4096 + RESERVED, 8192, 4096, 0) == DescriptorShares(8192, 4096)


def test_too_few_are_halved_after_the_reserve() -> None:
    assert shares(256, 8192, 4096, 0) == DescriptorShares((256 - RESERVED) // 2, (256 - RESERVED) // 2)
    given = shares(1024, 8192, 4096, 10)
    assert given.clients + given.upstream + RESERVED + 10 * PER_ENGINE == 1024


def test_what_one_side_does_not_need_the_other_gets() -> None:
    assert shares(1000 + RESERVED, 8192, 100, 0) == DescriptorShares(900, 100)
    assert shares(1000 + RESERVED, 100, 8192, 0) == DescriptorShares(100, 900)


def test_each_side_gets_a_few_however_low_the_limit() -> None:
    assert shares(20, 8192, 4096, 50) == DescriptorShares(SHARE_MIN, SHARE_MIN)
