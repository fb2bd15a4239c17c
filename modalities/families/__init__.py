"""Holds the model families: one module for each, with its `ARCHITECTURES` (as in config.json) and a function `load`.

Four folders hold what several families share. `causal_lm` is the text half of most families, and a family of its own
for models without media. `qwen_vl` serves `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`, `qwen2_5_omni` and `qwen3_omni`.
`tiled` serves `llava`, `llava_onevision` and `internvl`, which cut pictures into tiles. `audio_towers` encodes the
sounds of `qwen2_audio` and of the two Omni families.

`modalities.registry` finds a family by its architectures, and the serving code uses it as a `modalities.family.Family`.
Only the demo's training calls modules of families directly. Importing a family imports neither torch nor transformers.
The families know nothing of requests, queues or transfers.
"""
