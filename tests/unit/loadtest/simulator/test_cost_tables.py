from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fabric.contracts import ConfigError
from llm_workers.scheduling import StepWork
from loadtest.simulator.cost_tables import TABLES, EncodingCosts, load_table, measured_table, table_names


@pytest.mark.parametrize("name", [*table_names(), "measured"])
def test_a_shipped_table_names_its_source_and_what_was_assumed(name: str) -> None:
    table = load_table(name)
    assert table.name == name
    assert table.source
    assert table.assumed
    assert "seed" not in " ".join((table.source, *table.assumed))
    for kind in table.media.values():
        assert table.modality_to_encoding[kind.modality].forward_s(kind.cost) > 0.0


def test_the_curve_of_a_forward_pass_meets_the_points_of_the_source() -> None:
    pictures = load_table("omniconnector-a100").modality_to_encoding["image"]
    measured = {1: 4.8, 4: 7.2, 8: 10.1, 16: 16.3, 32: 29.7}
    assert {n: round(1e3 * pictures.forward_s(1024 * n), 3) for n in measured} == measured
    assert pictures.forward_s(1024 * 6) == pytest.approx((0.0072 + 0.0101) / 2)
    assert pictures.forward_s(512) < pictures.forward_s(1024) < pictures.forward_s(1100)
    assert pictures.forward_s(65536) == pytest.approx(0.0297 + 2 * (0.0297 - 0.0163))


def test_a_curve_of_one_point_is_proportional() -> None:
    assert EncodingCosts(((1000, 0.5),)).forward_s(2000) == 1.0


def test_a_step_costs_overhead_sequences_and_tokens() -> None:
    worker = load_table("omniconnector-a100").worker
    assert worker.step_s(StepWork(10, 100.0)) == pytest.approx(0.010 + 10 * 0.0001 + 100 * 0.00004)
    assert worker.prefill_s(1000) > worker.step_s(StepWork(0, 1000.0)), "later tokens have a context"


def test_links_follow_machines() -> None:
    table = load_table("dynamo-h100")
    assert table.link("m1", "m1").bytes_per_s == 600e9
    assert table.link("m1/a", "m1/a") == table.links["same_process"]
    assert table.link("m1/a", "m1/b") == table.links["same_host"]
    assert table.link("m1", "m2").bytes_per_s == 50e9


def test_a_medium_becomes_the_item_of_a_router() -> None:
    item = load_table("omniconnector-a100").kind("video-30f").item(2, "abc")
    assert (item.index, item.modality, item.num_tokens, item.cost) == (2, "video", 3840, 7680)
    assert len(item.unit_tokens) == 15


def test_wrong_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no cost table 'nothing'; the tables are dynamo-h100"):
        load_table("nothing")
    with pytest.raises(ConfigError, match="has no medium 'film'; it has image"):
        load_table("omniconnector-a100").kind("film")
    table = json.loads((TABLES / "omniconnector-a100.json").read_text())
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(table | {"colour": "blue"}))
    with pytest.raises(ConfigError, match="colour"):
        load_table(str(wrong))
    table["modality_to_encoding"]["image"]["forward"] = [[100, 0.2], [50, 0.1]]
    wrong.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="the curve of image must rise"):
        load_table(str(wrong))


def test_the_measured_table_has_the_figures_of_the_benches(tmp_path: Path) -> None:
    steps = [[f"engine, {n} at once", "steps", str(rate), "1/s"] for n, rate in ((1, 500), (8, 400), (32, 250))]
    (tmp_path / "path.json").write_text(
        json.dumps({"rows": [*steps, ["NIXL, two processes", "8 MiB, READ", "1.0", "ms"]]})
    )
    batches = [["image", f"batch of {n}, 448x448", "", "", "", str(10 * n)] for n in (1, 2, 4, 8, 16, 32)]
    films = [["video", "30 of 256x256", "", "", "", "90"], ["audio", "30 s", "", "", "", "20"]]
    (tmp_path / "encoder.json").write_text(json.dumps({"rows": [*batches, *films]}))
    table = measured_table(tmp_path)
    assert table.worker.step_s(StepWork(1, 0.0)) == pytest.approx(1 / 500)
    assert table.worker.step_s(StepWork(32, 0.0)) == pytest.approx(1 / 250)
    assert table.modality_to_encoding["image"].forward_s(4096) == pytest.approx(0.04)
    assert table.links["network"].bytes_per_s == pytest.approx(2**23 / 1e-3)
    assert msgspec.json.decode(msgspec.json.encode(table), type=type(table)) == table
    (tmp_path / "encoder.json").write_text('{"rows": []}')
    with pytest.raises(ConfigError, match="lack a row"):
        measured_table(tmp_path)
