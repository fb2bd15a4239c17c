"""Tests `weft init`: the plan fits its devices and passes the check, or the error says what the model takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import compose
from deploy.cli import main
from deploy.commands.config_writer import planned_text, summary, written
from deploy.config import ClusterConfig
from deploy.config_file import check_config
from deploy.gpu_devices import MIB, find_devices, named_devices
from deploy.sizing.budget import plan_budget
from deploy.sizing.planned_cluster import (
    CONTEXT_BYTES,
    GIB,
    USABLE_SHARE,
    GpuDevice,
    Machine,
    PlannedCluster,
    plan_cluster,
)
from deploy.sizing.stored_weights import StoredWeights
from deploy.testing import TinyFamily
from fabric.contracts import ConfigError
from modalities.family import DEFAULT_OPTIONS, ImageHeader, ItemPlan, MediaHeader, MediaOptions, ModelShape

Captured = pytest.CaptureFixture[str]
HOST = {"num_cpus": 32, "memory_bytes": 256 * GIB}


class ShapedFamily(TinyFamily):
    """A `ShapedFamily` has the shape of a model of any size."""

    def __init__(self, shape: ModelShape, takes_media: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.max_items = {"image": 4} if takes_media else {}

    def plan(self, header: MediaHeader, options: MediaOptions = DEFAULT_OPTIONS) -> ItemPlan:
        """Scales large pictures down, as models do."""
        assert isinstance(header, ImageHeader)
        return super().plan(ImageHeader("PNG", min(2048, header.width), min(2048, header.height), "RGB"), options)


def shape(hidden: int = 4096, layers: int = 32, kv_heads: int = 8, context: int = 32768) -> ModelShape:
    return ModelShape(hidden, 1, layers, kv_heads, 128, 152_000, context)


def model(of: ModelShape | None = None, takes_media: bool = True) -> compose.Model:
    return compose.Model(Path("/models/m"), "m", ShapedFamily(of or shape(), takes_media))


def gpus(*sizes: float, is_slice: bool = False) -> tuple[GpuDevice, ...]:
    return tuple(GpuDevice(str(at), "GPU", int(size * GIB), is_slice) for at, size in enumerate(sizes))


def planned(devices: tuple[GpuDevice, ...], of: compose.Model, language: float, encoder: float = 0.6) -> PlannedCluster:
    """Plans a cluster for a model with so many billion parameters, in bfloat16."""
    device = "cuda" if devices else "cpu"
    pool = {"device": device, "gpus_per_replica": 1 if devices else 0}
    sections = {"model": {"path": "/models/m", "dtype": "bfloat16"}, "encoders": pool, "workers": pool}
    config = ClusterConfig.model_validate(sections)
    weights = StoredWeights(int(encoder * 1e9), int(language * 1e9))
    return plan_cluster(Machine(devices, **HOST), config, of, weights)


def check(plan: PlannedCluster, of: compose.Model, language: float, encoder: float = 0.6) -> None:
    """Asserts that a plan fits its devices, that its file says the same, and that the check has nothing against it."""
    text = written(plan, Machine(plan.used, **HOST))
    read, problems = check_config(text)
    assert problems == []
    assert read is not None
    for section in ("encoders", "workers"):
        assert getattr(read, section) == getattr(plan.config, section), text
    budget = plan_budget(read, of, StoredWeights(int(encoder * 1e9), int(language * 1e9)))
    assert budget.problems == ()
    if not plan.used:
        return
    num_encoders, num_workers, num_ranks, is_shared = plan.arrangement
    num_devices = num_workers * num_ranks + (0 if is_shared else num_encoders)
    assert num_devices <= len(plan.used)
    assert of.family.shape.num_kv_heads % num_ranks == 0
    sums = [sum(row.nbytes or 0 for row in process.rows if row.place == "cuda") for process in budget.processes]
    taken = sum(sums) if is_shared else max(sums)
    assert taken <= min(device.memory_bytes for device in plan.used) * USABLE_SHARE - CONTEXT_BYTES
    shares = read.encoders.gpus_per_replica + read.workers.gpus_per_replica
    assert not is_shared or shares == 1
    assert read.allow_shared_gpu == is_shared


@pytest.mark.parametrize(
    ("devices", "language", "arrangement"),
    [
        (gpus(80), 8, (1, 1, 1, True)),
        (gpus(*[80] * 8), 8, (2, 6, 1, False)),
        (gpus(*[80] * 8), 70, (4, 1, 4, False)),
        (gpus(*[80] * 2), 40, (1, 1, 2, True)),
        (gpus(*[24] * 4), 14, (2, 1, 2, False)),
        (gpus(*[20] * 7, is_slice=True), 4, (1, 6, 1, False)),
    ],
)
def test_the_arrangement_of_devices(
    devices: tuple[GpuDevice, ...], language: float, arrangement: tuple[int, int, int, bool]
) -> None:
    plan = planned(devices, model(), language)
    assert tuple(plan.arrangement) == arrangement
    check(plan, model(), language)


def test_blocks_on_a_gpu_are_what_the_kernel_reads_in_place() -> None:
    whole, spread, without = (
        planned(gpus(*devices), model(), 8).config.workers for devices in ([80] * 2, [14] * 8, [])
    )
    assert (whole.block_size, whole.cuda_graphs) == (256, "auto")
    assert (spread.block_size, spread.cuda_graphs) == (256, "off"), "several ranks record nothing"
    assert spread.tensor_parallel > 1
    assert (without.block_size, without.cuda_graphs) == (16, "off")


def test_a_model_of_text_has_no_encoder() -> None:
    of = model(takes_media=False)
    plan = planned(gpus(*[80] * 8), of, 8)
    assert tuple(plan.arrangement) == (0, 8, 1, False)
    check(plan, of, 8)
    assert "replicas: 0" in written(plan, Machine(plan.used, **HOST))


@pytest.mark.parametrize(
    ("devices", "language", "said"),
    [
        (gpus(24, 24), 70, "8 such devices hold a worker, and one more the encoder"),
        (gpus(24, 24), 400, "even 8 ranks, the most that its 8 KV heads allow, take"),
        (gpus(*[24] * 8), 400, "allow no more ranks, so it needs larger devices"),
        (gpus(*[10] * 7, is_slice=True), 8, "workers on slices have one rank, so use larger slices or whole devices"),
        ((), 400, "does not fit into this machine, which has no GPU"),
    ],
)
def test_a_model_that_does_not_fit_is_told_with_what_it_takes(
    devices: tuple[GpuDevice, ...], language: float, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        planned(devices, model(), language)
    assert raised.value.message.startswith("m does not fit")
    assert said in raised.value.message
    assert "GiB" in raised.value.message


def test_a_checkpoint_that_can_not_be_counted_is_told() -> None:
    with pytest.raises(ConfigError, match="has no safetensors files whose parameters could be counted"):
        plan_cluster(Machine(gpus(80), **HOST), ClusterConfig(), model(), None)


def test_devices_that_are_too_small_are_left_out() -> None:
    plan = planned(gpus(80, 8, 80), model(), 14)
    assert [device.device_id for device in plan.used] == ["0", "2"]
    text = written(plan, Machine(gpus(80, 8, 80), **HOST))
    assert "# Too small for the model: 1 x GPU, 8 GiB." in text
    assert "CUDA_VISIBLE_DEVICES=0,2" in text


def test_slices_say_how_ray_is_started() -> None:
    slices = gpus(20, 20, is_slice=True)
    plan = planned(slices, model(), 4)
    text = written(plan, Machine(slices, **HOST))
    assert "CUDA_VISIBLE_DEVICES=0,1 \\" in text
    assert "ray start --head --num-gpus=2" in text
    read, _ = check_config(text)
    assert read is not None
    assert read.ray.address == "auto"


def test_a_context_that_does_not_fit_is_told() -> None:
    of = model(shape(context=4_000_000))
    plan = planned(gpus(80, 80), of, 30)
    assert not plan.is_context_whole
    assert "# That is less than the model's context, so longer requests are refused." in written(
        plan, Machine(plan.used, **HOST)
    )
    check(plan, of, 30)


@settings(max_examples=60)
@given(
    devices=st.lists(st.sampled_from([8, 16, 24, 40, 80, 141]), max_size=10),
    is_slice=st.booleans(),
    takes_media=st.booleans(),
    language=st.floats(0.1, 500),
    encoder=st.floats(0.05, 8),
    hidden=st.sampled_from([512, 2048, 8192]),
    layers=st.integers(2, 90),
    kv_heads=st.sampled_from([1, 2, 3, 8, 16]),
    context=st.sampled_from([2048, 32768, 1_000_000]),
)
def test_every_machine_gets_a_config_that_passes_or_a_clear_error(
    devices: list[int],
    is_slice: bool,
    takes_media: bool,
    language: float,
    encoder: float,
    hidden: int,
    layers: int,
    kv_heads: int,
    context: int,
) -> None:
    of = model(shape(hidden, layers, kv_heads, context), takes_media)
    try:
        plan = planned(gpus(*devices, is_slice=is_slice), of, language, encoder)
    except ConfigError as error:
        plan, said = None, error.message
    if plan is None:
        assert said.startswith("m does not fit")
        return
    check(plan, of, language, encoder)
    assert summary(plan).count("worker") >= 1


# ------------------------------------------------------------ finding devices

LISTED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111)
  MIG 2g.20gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-cccc)
"""
SIZES = "GPU-aaaa, 81920\nGPU-bbbb, 81920\nGPU-cccc, 81559\n"


def smi(arguments: list[str]) -> str:
    return LISTED if arguments == ["-L"] else SIZES


def test_devices_are_those_that_nvidia_smi_lists_with_slices_in_place_of_their_device() -> None:
    found = find_devices(smi, {})
    assert [(each.device_id, each.memory_bytes // GIB, each.is_slice) for each in found] == [
        ("MIG-1111", 40, True),
        ("MIG-2222", 20, True),
        ("1", 80, False),
        ("2", 79, False),
    ]
    assert found[0].name == "NVIDIA A100-SXM4-80GB (40 GB slice)"


@pytest.mark.parametrize(
    ("visible", "ids"),
    [("1", ["1"]), ("2,1", ["1", "2"]), ("GPU-cc", ["2"]), ("MIG-2222", ["MIG-2222"]), ("", []), ("9", [])],
)
def test_devices_that_are_hidden_do_not_count(visible: str, ids: list[str]) -> None:
    assert [each.device_id for each in find_devices(smi, {"CUDA_VISIBLE_DEVICES": visible})] == ids


def test_a_machine_without_a_driver_has_no_devices() -> None:
    def run(_: list[str]) -> str:
        raise OSError("there is no nvidia-smi")

    assert find_devices(run, {}) == []


@pytest.mark.parametrize("text", ["", "80GB", "8x", "0x80GB", "8x0GB", "65x80GB", "8x80TB", "1x80GB,two", "2xH101"])
def test_devices_are_named_in_one_form(text: str) -> None:
    with pytest.raises(ConfigError, match="is not written as NUMBERxSIZE"):
        named_devices(text)


def test_named_devices() -> None:
    assert [each.memory_bytes // GIB for each in named_devices("2x80GB, 1x24")] == [80, 80, 24]
    assert [each.memory_bytes // MIB for each in named_devices("1xH100,2xl40s")] == [81_559, 46_068, 46_068]
    assert named_devices("none") == []


# ------------------------------------------------------------ the command


def test_the_written_config_passes_weft_check(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "weft.yaml"
    assert main(["init", "--demo", "--gpus", "none", "--output", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "no GPU: 1 encoder and 1 worker; each worker holds 32,768 tokens" in printed
    assert f"weft serve --config {file}" in printed
    assert main(["check", str(file)]) == 0
    assert "the config is valid (1 router, 1 encoder, 1 worker replicas)" in capsys.readouterr().out
    assert main(["init", "--demo", "--gpus", "8x80GB", "--output", str(file)]) == 1
    assert "exists already; name another one with --output, or replace it with --force" in capsys.readouterr().err
    assert main(["init", "--demo", "--gpus", "8x80GB", "--output", str(file), "--force"]) == 0
    capsys.readouterr()
    assert main(["check", str(file)]) == 0
    assert "2 encoder, 6 worker replicas" in capsys.readouterr().out
    assert main(["init", "--demo", "--gpus", "1x80GB", "--output", "-"]) == 0
    read, problems = check_config(capsys.readouterr().out)
    assert problems == []
    assert read is not None
    assert read.allow_shared_gpu


def test_what_is_no_model_or_no_folder_is_told(tmp_path: Path, capsys: Captured) -> None:
    for words, said in (
        (["--model", str(tmp_path), "--output", "-"], "has no config.json"),
        (["--demo", "--gpus", "none", "--output", str(tmp_path / "none" / "a.yaml")], "can't be written"),
        (["--demo", "--gpus", "2x0.5GB", "--output", "-"], "weft-demo does not fit"),
    ):
        assert main(["init", *words]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["init"])
    assert "one of the arguments --model --demo is required" in capsys.readouterr().err


def test_paths_with_quotes_survive(tmp_path: Path) -> None:
    from deploy.testing import write_demo_variant

    folder = write_demo_variant(tmp_path / "it's: a #model", "Qwen3OmniMoeThinkerForConditionalGeneration")
    text, plan = planned_text(Machine((), **HOST), folder)
    read, _ = check_config(text)
    assert read is not None
    assert read.model.path == plan.config.model.path == folder
