"""The checksum of weights is the same for every way in which ranks cut them, and another one for other values."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.backends.torch.weights.checksums import PartChecksum, joint_checksum

pytestmark = pytest.mark.torch

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.float8_e4m3fn)


def cuts(draw, size):
    """Ranges that partition a dim, also in places that are no multiples of a word."""
    points = draw(st.lists(st.integers(0, size), max_size=3))
    ends = sorted({0, size, *points})
    return [*itertools.pairwise(ends)]


def boxes(draw, shape):
    """Boxes that partition a tensor."""
    found = [()]
    for size in shape:
        found = [(*box, part) for box in found for part in cuts(draw, size)]
    return found


def never(name):
    raise AssertionError(f"{name} is read again")


def checksum_of(tensor, parts, read_whole=never):
    found = [
        PartChecksum.of("w", tensor[tuple(slice(a, b) for a, b in box)], tuple(tensor.shape), box) for box in parts
    ]
    return joint_checksum([*found, *found[::-1]], read_whole)  # replicas read the same


@given(st.data(), st.lists(st.integers(1, 9), max_size=3), st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_no_cut_changes_it_and_any_value_does(data, shape, dtype):
    tensor = torch.randint(-9, 9, shape).to(torch.float32).to(dtype)
    whole = checksum_of(tensor, [()])
    assert checksum_of(tensor, boxes(data.draw, shape)) == whole
    at = data.draw(st.integers(0, math.prod(shape) - 1))
    other = tensor.clone()
    other.view(-1)[at] = tensor.reshape(-1)[at].to(torch.float32) + 1
    assert checksum_of(other, boxes(data.draw, shape)) != whole


def test_an_exchange_of_rows_columns_shape_or_format_changes_it():
    tensor = torch.arange(96.0).view(8, 12)
    others = [tensor[[1, 0, *range(2, 8)]], tensor[:, [1, 0, *range(2, 12)]], -tensor]
    others += [tensor.view(12, 8), tensor.to(torch.bfloat16), tensor.double()]
    found = {checksum_of(t, [()]) for t in (tensor, *others)}
    assert len(found) == 7


def test_parts_that_overlap_without_being_equal_are_read_again():
    tensor = torch.arange(60.0).view(6, 10)
    read = []

    def whole(name):
        read.append(name)
        return tensor

    crossed = [((1, 5),), ((0, 3),), ((3, 6),)]
    assert checksum_of(tensor, crossed, whole) == checksum_of(tensor, [()])
    assert read == ["w"]
    nested = [(), ((0, 3),), ((3, 6),)]  # one rank has all, two have halves
    assert checksum_of(tensor, nested) == checksum_of(tensor, [()])
