"""What a helper process knows of itself. Its limits are tried by `tests/parity/test_encoder_decoding.py`."""

from __future__ import annotations

import mmap
import sys

import pytest

from fabric.helper_process import data_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the data of a process in its own way")
def test_data_counts_what_a_process_maps_for_itself_alone() -> None:
    before = data_bytes()
    shared, own = (mmap.mmap(-1, 256 * 2**20, flags=flags) for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE))
    grown = data_bytes() - before
    shared.close()
    own.close()
    assert 256 * 2**20 <= grown < 512 * 2**20
    assert data_bytes() < before + 256 * 2**20
