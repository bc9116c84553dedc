"""Copies beside the engine's work; on a GPU the same tests see real streams."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from kvferry.layout.streams import Mark, SideStream, pinned
from tests.layout.paging import Cache, expected_rows

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "2BNHD", "BLHNC"])
def test_a_round_trip_through_pinned_staging_on_a_side_stream(layout, device):
    source = Cache(layout, device=device, head_dim=4)
    target = Cache("HND", device=device, head_dim=4)
    there, here = source.paged(), target.paged()
    side = SideStream(device)
    shape = (2, 3, 8, 8)
    staging = memoryview(mmap.mmap(-1, 4 * int(np.prod(shape))))
    rows = there.as_rows(staging, shape)
    with pinned(staging, device):
        source.fill()  # the engine's work: in its own stream, right before
        gathered = side.run(
            lambda: there.gather(rows, 0, there.runs([2, 4], 0, 8), 0), after=side.mark()
        )
        assert gathered.wait(10)
        expected = expected_rows(source, [2, 4], 0, 8)
        assert np.frombuffer(staging, np.int32).tobytes() == expected.tobytes()
        loaded = side.run(lambda: here.scatter(rows, 0, here.runs([5, 1], 0, 8), 0), after=Mark())
        loaded.hold()
        assert np.array_equal(expected_rows(target, [5, 1], 0, 8), expected)
    assert loaded.poll()


class NeverReached:
    """An event that does not happen."""

    def query(self) -> bool:
        return False


def test_waiting_ends_at_its_deadline():
    mark = Mark(NeverReached())
    assert not mark.poll()
    assert mark.wait(0.001) is False
    assert Mark().wait(0.0) is True


def test_a_failure_of_the_work_is_the_callers():
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        SideStream("cpu").run(fail, after=Mark())
