"""Tests the cluster's memory budget: it finds the largest media with the family's own plan, reads the sizes of weights
from their files' headers, and lists every pool in a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modalities_files import PREPROCESSOR, thinker_config, write_config

from deploy.compose import Model, load_model, loaded_modalities, open_model
from deploy.config import ClusterConfig
from deploy.sizing import budget as memory
from deploy.sizing import budget_lines, refuse_if_too_small
from deploy.sizing.budget import plan_budget
from deploy.sizing.largest_media import largest_item, largest_items
from deploy.sizing.stored_weights import StoredWeights, read_stored_weights
from deploy.stages_config import DEFAULT_STAGES
from fabric.contracts import ConfigError, InvalidMedia
from llm_workers.scheduling import LargestItem
from modalities.family import AudioHeader, Family, ImageHeader, VideoHeader
from modalities.media import MediaLimits

GPU = {"device": "cuda", "gpus_per_replica": 1}


def config(**sections: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"name": "tiny"}, **sections})


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Returns a model whose pictures have at most 256 x 256 pixels, with a token per 32 x 32: these are 64 tokens, with
    features of 4 levels x 64."""
    return load_model(config(), write_config(tmp_path, thinker_config()))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    tensors = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_the_largest_picture_is_the_familys_own(model: Model) -> None:
    found = largest_item(model.family, "image", MediaLimits())
    assert found is not None
    assert (found.num_tokens, found.max_unit_tokens, found.cost) == (64, 64, 256)


@pytest.fixture(scope="module")
def odd_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Returns a family that takes at most 980 tokens of 32 x 32 pixels; 980 is not a square number."""
    sizes = {"size": {"shortest_edge": 3136, "longest_edge": 1_003_520}}
    model_dir = write_config(tmp_path_factory.mktemp("odd"), thinker_config(), {**PREPROCESSOR, **sizes})
    return load_model(config(), model_dir).family


@pytest.fixture(scope="module")
def odd_largest(odd_family: Family) -> dict[str, LargestItem]:
    return {item.modality: item for item in largest_items(odd_family, tuple(odd_family.max_items), MediaLimits())}


@settings(deadline=None, max_examples=300)
@given(area=st.floats(2, 8.2), ratio=st.floats(-1.5, 1.5))
def test_no_picture_is_larger_than_the_largest(
    odd_family: Family, odd_largest: dict[str, LargestItem], area: float, ratio: float
) -> None:
    width, height = (max(1, int((10 ** (area + sign * ratio)) ** 0.5)) for sign in (1, -1))
    largest = odd_largest["image"]
    assert largest.num_tokens == 980
    try:
        plan = odd_family.plan(ImageHeader("PNG", width, height, "RGB"))
    except InvalidMedia:
        return
    assert sum(plan.unit_tokens) <= largest.num_tokens
    assert plan.cost <= largest.cost


@settings(deadline=None, max_examples=100)
@given(area=st.floats(3, 7.5), ratio=st.floats(-1, 1), seconds=st.floats(0.1, 3600), fps=st.integers(1, 60))
def test_no_video_is_much_larger_than_the_largest(
    odd_family: Family, odd_largest: dict[str, LargestItem], area: float, ratio: float, seconds: float, fps: int
) -> None:
    """The search for the largest video tries sizes in steps, so a frame between two steps may be a row or two of
    patches larger."""
    width, height = (max(1, int((10 ** (area + sign * ratio)) ** 0.5)) for sign in (1, -1))
    num_frames = max(1, int(seconds * fps))
    try:
        plan = odd_family.plan(VideoHeader("mp4", width, height, num_frames, num_frames / fps))
    except InvalidMedia:
        return
    largest = odd_largest["video"]
    assert sum(plan.unit_tokens) <= 1.1 * largest.num_tokens
    assert max(plan.unit_tokens) <= 1.1 * largest.max_unit_tokens


def test_the_largest_sound_is_the_longest_and_its_units_are_small(
    odd_family: Family, odd_largest: dict[str, LargestItem]
) -> None:
    limits = MediaLimits()
    plan = odd_family.plan(AudioHeader("wav", 16_000, 1, int(limits.max_audio_seconds * 16_000)))
    found = odd_largest["audio"]
    assert (found.num_tokens, found.cost) == (sum(plan.unit_tokens), plan.cost)
    assert found.max_unit_tokens == max(plan.unit_tokens) < found.num_tokens
    assert 0 < found.max_unit_cost < found.cost


def test_arenas_are_the_seeds_or_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    two = config(encoders={"replicas": 2}, workers={"replicas": 4})
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**40)
    assert (memory.arena_bytes(two), memory.inbox_bytes(two)) == (8 * 10**9, 10**9)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 2**34)
    assert (memory.arena_bytes(two), memory.inbox_bytes(two)) == (2**30, 2**28)
    stated = config(encoders={"arena_bytes": "1MiB"}, workers={"inbox_bytes": "2MiB"})
    assert (memory.arena_bytes(stated), memory.inbox_bytes(stated)) == (2**20, 2**21)


def test_what_no_encoder_is_told_is_what_the_model_takes(model: Model) -> None:
    assert loaded_modalities(config(), model.family) == tuple(model.family.max_items)
    assert loaded_modalities(config(encoders={"modalities": ["image"]}), model.family) == ("image",)
    assert loaded_modalities(config(encoders={"replicas": 0}), model.family) == ()


def test_limits_below_the_familys_own_count(model: Model) -> None:
    found = largest_item(model.family, "image", MediaLimits(max_image_pixels=128 * 128))
    assert found is not None
    assert 16 <= found.num_tokens < 64  # Each side is rounded to the nearest multiple, up or down.


def test_what_the_family_does_not_take_has_no_largest(model: Model) -> None:
    assert largest_items(model.family, ("sketch",), MediaLimits()) == []


def test_weights_are_counted_by_part(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", {"thinker.visual.blocks.0.w": [3, 4], "thinker.model.w": [5]})
    write_safetensors(
        tmp_path / "model-2.safetensors", {"talker.w": [100], "token2wav.w": [7], "lm_head.weight": [2, 2]}
    )
    assert read_stored_weights(tmp_path) == StoredWeights(12, 9, num_talker=100, num_code2wav=7)


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": {}}'])
def test_broken_weight_files_count_as_unknown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read_stored_weights(tmp_path) is None


def test_the_table_names_every_pool_with_its_sum(model: Model) -> None:
    cluster = config(
        encoders={"arena_bytes": "1MiB"},
        workers={"replicas": 2, "num_blocks": 100, "block_size": 16, "inbox_bytes": "2MiB"},
    )
    text = "\n".join(budget_lines(plan_budget(cluster, model, StoredWeights(2**18, 2**20))))
    assert "memory of one replica (tiny, float32):" in text
    assert "largest image: 64 tokens, 256 patches" in text
    assert "encoder (x1)" in text
    assert "worker (x2)" in text
    for line in ("weights          1.0 MiB  host", "weights          4.0 MiB", "KV               1.6 MiB"):
        assert line in text
    assert "inbox            2.0 MiB  host  room for 31 of the largest image" in text


def test_the_stages_that_speak_have_budgets_of_their_own() -> None:
    stages = {"stage_args": [stage.model_dump() for stage in DEFAULT_STAGES]}
    stages["stage_args"][1] |= {"replicas": 2, "num_blocks": 100, "block_size": 8}
    speaking, model = open_model(ClusterConfig.model_validate({"stages": stages}))
    weights = StoredWeights(1000, 2000, num_talker=3000, num_code2wav=4000)
    found = {each.kind: each for each in plan_budget(speaking, model, weights).processes}
    assert list(found) == ["encoder", "worker", "talker", "code2wav"]
    assert found["talker"].num_replicas == 2
    hidden, vocab_size = model.family.shape.hidden_size, model.family.shape.vocab_size
    talker = {row.name: row.nbytes for row in found["talker"].rows}
    # The demo's talker has 4 layers with 2 heads of 32 for keys and values.
    assert talker == {"weights": 4 * 3000, "embeddings": 4 * vocab_size * hidden, "KV": 800 * 2 * 4 * 2 * 32 * 4}
    assert {row.name: row.nbytes for row in found["code2wav"].rows} == {"weights": 4 * 4000, "states": None}
    kept = {row.name: row.nbytes for row in found["worker"].rows}["for speech"]
    assert kept == speaking.workers.num_blocks * speaking.workers.block_size * hidden * 4
    assert "talker (x2)" in "\n".join(budget_lines(plan_budget(speaking, model, weights)))


def test_a_model_that_can_not_speak_has_no_budget_with_stages(model: Model) -> None:
    with pytest.raises(ConfigError, match="without a talker"):
        plan_budget(config(stages={}), model, None)


def test_arenas_on_a_gpu_count_there_and_what_lies_beside_them_on_the_host(model: Model) -> None:
    cluster = config(
        encoders={**GPU, "arena_device": "auto", "arena_bytes": "1KiB", "spill_bytes": "2MiB"},
        workers={**GPU, "inbox_device": "auto", "inbox_bytes": "4MiB"},
    )
    budget = plan_budget(cluster, model, None)
    places = {row.name: (row.nbytes, row.place) for process in budget.processes for row in process.rows}
    assert places["arena"] == (2**10, "cuda")
    assert places["spill"] == (2**21, "host")
    assert places["inbox"] == (2**22, "cuda")
    assert places["staging"] == (2**22, "host")
    assert not budget.problems, "what does not fit the device fits the host"


def test_on_a_gpu_features_stay_on_the_host(model: Model) -> None:
    cluster = config(workers={"device": "cuda", "gpus_per_replica": 1})
    (_, worker) = plan_budget(cluster, model, None).processes
    assert {row.name: row.place for row in worker.rows} == {
        "weights": "cuda",
        "KV": "cuda",
        "workspace": "cuda",
        "inbox": "host",
        "kept": "host",
        "grammars": "host",
    }
    assert "without weights" in "\n".join(budget_lines(plan_budget(cluster, model, None)))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"workers": {"num_blocks": 2}}, "num_blocks must be at least 8"),
        ({"workers": {"inbox_bytes": 65536}}, "workers: inbox_bytes is 65536"),
        ({"encoders": {"arena_bytes": 65536}}, "encoders: arena_bytes is 65536"),
    ],
)
def test_what_can_never_serve_is_refused_with_the_table(
    model: Model, sections: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_if_too_small(config(**sections), model)
    assert message in refused.value.message
    assert "memory of one replica" in refused.value.message


def test_a_cluster_for_text_needs_no_room_for_pictures(model: Model) -> None:
    workers = {"num_blocks": 2, "inbox_bytes": 64}
    with pytest.raises(ConfigError):
        refuse_if_too_small(config(workers=workers), model)
    refuse_if_too_small(config(encoders={"replicas": 0}, workers=workers), model)
