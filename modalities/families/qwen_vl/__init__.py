"""Implements what the Qwen vision families share: pictures and frames cut into merged patches, M-RoPE, vision towers,
and a text half.

A family consists of a `Layout` (the names in its config files, transformers' defaults, the times of a video's steps,
and its handling of sound) and a `Checkpoint` (its transformers classes), which `QwenVLFamily` combines. `layout` reads
the config files. `patches` plans pictures and videos and turns them into patches. `prompt_layout` says which tokens and
positions a medium takes up in the prompt. `qwen_vl_family` answers a `Family`'s questions with these three. `towers`
holds `Checkpoint`, and loads and runs the encoders; `tower_tables` computes on the host what a tower needs to know of
the grids in a batch.

The families `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`, `qwen2_5_omni` and `qwen3_omni` are built from this package. Only
`towers` and `tower_tables` import torch. The package knows nothing of requests and queues.
"""
