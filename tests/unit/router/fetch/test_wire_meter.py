"""Tests what an answer may cost beside the file in it."""

from __future__ import annotations

import pytest

from fabric.contracts import MediaUnreachable
from router.fetch.wire_meter import (
    HEAD_READ_BYTES,
    LARGE_PIECE_BYTES,
    MAX_HEAD_BYTES,
    MAX_INTERIM_ANSWERS,
    MAX_OVERHEAD_BYTES,
    MAX_SMALL_PIECES,
    WireMeter,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


def receive(meter: WireMeter, num_bytes: int, piece_bytes: int, wire_bytes: int | None = None) -> None:
    """Receives so much of a body in pieces, for each of which `wire_bytes` are read."""
    for _ in range(0, num_bytes, piece_bytes):
        meter.read(bytes(piece_bytes if wire_bytes is None else wire_bytes))
        meter.hand_on(piece_bytes)


def read_all(meter: WireMeter, data: bytes, size: int) -> None:
    for at in range(0, len(data), size):
        meter.read(data[at : at + size])


def hand_on(meter: WireMeter, num_pieces: int) -> None:
    for _ in range(num_pieces):
        meter.hand_on(1)


def in_body() -> WireMeter:
    meter = WireMeter()
    meter.read(HEAD)
    meter.head_ended()
    return meter


@pytest.mark.parametrize("piece_bytes", [65536, 16384, 1369, 536, LARGE_PIECE_BYTES])
def test_a_file_in_ordinary_pieces_of_any_number_passes(piece_bytes: int) -> None:
    meter = in_body()
    receive(meter, 20_000 * piece_bytes, piece_bytes)
    assert meter.num_read_bytes == len(HEAD) + 20_000 * piece_bytes


def test_a_small_file_may_come_byte_by_byte() -> None:
    meter = in_body()
    receive(meter, MAX_SMALL_PIECES - 1, 1)
    assert meter.num_read_bytes == len(HEAD) + MAX_SMALL_PIECES - 1


def test_small_reads_without_end_are_refused() -> None:
    meter = in_body()
    with pytest.raises(MediaUnreachable, match="answer in too many small pieces"):
        receive(meter, 10**9, 1)
    assert meter.num_read_bytes < 2 * MAX_SMALL_PIECES


def test_small_pieces_in_large_reads_are_refused() -> None:
    meter = in_body()
    meter.read(bytes(60_000))
    for _ in range(MAX_SMALL_PIECES):
        meter.hand_on(1)
    with pytest.raises(MediaUnreachable, match="file in too many small pieces"):
        hand_on(meter, 10)


def test_small_pieces_behind_a_large_file_are_refused() -> None:
    meter = in_body()
    receive(meter, 2**26, 65536)
    before = meter.num_read_bytes
    with pytest.raises(MediaUnreachable, match="small pieces"):
        receive(meter, 10**9, 1, wire_bytes=6)
    assert meter.num_read_bytes - before < 6 * (2**26 // LARGE_PIECE_BYTES + 2 * MAX_SMALL_PIECES)


@pytest.mark.parametrize("num_file_bytes", [0, 10**6])
def test_what_is_no_file_may_be_as_much_as_the_file_and_a_little_more(num_file_bytes: int) -> None:
    meter = in_body()
    receive(meter, num_file_bytes, 50_000)
    before = meter.num_read_bytes
    with pytest.raises(MediaUnreachable, match="little of the file"):
        read_all(meter, bytes(10**7), 4096)
    assert num_file_bytes <= meter.num_read_bytes - before <= num_file_bytes + MAX_OVERHEAD_BYTES + 4096


def test_extensions_of_chunks_count_by_what_they_are() -> None:
    receive(in_body(), 10**6, 1000, wire_bytes=1900)
    with pytest.raises(MediaUnreachable, match="little of the file"):
        receive(in_body(), 10**6, 1000, wire_bytes=2500)


def test_a_head_has_a_limit_and_is_read_in_small_steps() -> None:
    meter = WireMeter()
    assert meter.num_wanted == HEAD_READ_BYTES
    for _ in range(MAX_HEAD_BYTES // HEAD_READ_BYTES):
        meter.read(bytes(HEAD_READ_BYTES))
    with pytest.raises(MediaUnreachable, match=f"head of more than {MAX_HEAD_BYTES} bytes"):
        meter.read(b"x")
    meter = in_body()
    assert meter.num_wanted > HEAD_READ_BYTES
    meter.read(bytes(65536))


@pytest.mark.parametrize("size", [1, 7, 25, 1000])
def test_interim_answers_are_counted_however_they_are_read(size: int) -> None:
    enough, flood = MAX_INTERIM_ANSWERS * INTERIM + HEAD, (MAX_INTERIM_ANSWERS + 1) * INTERIM + HEAD
    read_all(WireMeter(), enough, size)
    with pytest.raises(MediaUnreachable, match="interim answers without end"):
        read_all(WireMeter(), flood, size)


def test_a_head_may_name_the_protocol_in_its_values() -> None:
    meter = WireMeter()
    for _ in range(100):
        meter.read(b"via: HTTP/1.1 a proxy\r\n")
    meter.head_ended()
    meter.read(b"\nHTTP/" * 100)
    assert meter.num_read_bytes == 100 * (len(b"via: HTTP/1.1 a proxy\r\n") + len(b"\nHTTP/"))
