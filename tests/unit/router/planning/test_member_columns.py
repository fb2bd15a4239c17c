"""Tests the columns of members, and that the C search reads those that Python keeps."""

from __future__ import annotations

import numpy as np
import pytest
from planning_samples import encoder_member, worker_member

from fabric.c_structures import declared_structure
from router.planning import compiled_search
from router.planning.member_columns import MAX_AWAITED, EncoderColumns, SlotColumns, WorkerColumns


@pytest.mark.parametrize(("columns", "member"), [(WorkerColumns, worker_member), (EncoderColumns, encoder_member)])
def test_c_reads_every_column_by_its_name(columns: type[SlotColumns], member: type) -> None:
    """Each array has the dtype that C gives it and a value for each slot, also after the columns have moved."""
    library = compiled_search.load_library()
    if library is None:
        pytest.skip("there is no C compiler")
    kept = columns()
    for slot in (0, 20):
        kept.add(member(f"m{slot}"), slot)
        described = kept.described(library)
        assert (described.num, described.stride) == (slot + 1, kept.capacity)
        for name, dtype in declared_structure(library, kept.C_NAME).array_to_dtype.items():
            array = getattr(kept, name)
            assert (array.dtype, array.shape[-1]) == (dtype, kept.capacity), name
            assert getattr(described, name) == array.ctypes.data, name


def test_a_column_that_only_c_names_is_refused() -> None:
    library = compiled_search.load_library()
    if library is None:
        pytest.skip("there is no C compiler")
    columns = WorkerColumns()
    del columns.pending_blocks
    with pytest.raises(AttributeError, match="pending_blocks"):
        columns.described(library)


def test_each_column_is_a_row_of_one_table() -> None:
    workers, encoders = WorkerColumns(), EncoderColumns()
    assert workers.names()[:2] == encoders.names()[:2] == ["num_open", "open_units"]
    assert workers.names()[-1] == "delivery_s"
    assert encoders.names()[-1] == "pending_decode_s"
    for columns in (workers, encoders):
        rows = [getattr(columns, name) for name in columns.names()]
        assert [row.shape for row in rows] == [(columns.capacity,)] * len(rows)
        assert all(np.shares_memory(row, columns._table) for row in rows)
        assert len({row.ctypes.data for row in rows}) == len(columns._table)


def test_many_moments_become_fewer_and_later_ones() -> None:
    workers = WorkerColumns()
    workers.add(worker_member("w"), 0)
    workers.list_awaited(0, [(float(number), 1.0) for number in range(2 * MAX_AWAITED + 1)])
    num = int(workers.num_awaited[0])
    assert workers.awaited[:num, 0].tolist() == [*range(2, 2 * MAX_AWAITED, 3), 2 * MAX_AWAITED][:num]
    assert workers.awaited[MAX_AWAITED : MAX_AWAITED + num, 0].sum() == 2 * MAX_AWAITED + 1
    workers.list_awaited(0, [(7.0, 3.0)])
    assert (workers.num_awaited[0], workers.awaited[0, 0], workers.awaited[MAX_AWAITED, 0]) == (1, 7.0, 3.0)
