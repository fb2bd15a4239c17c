"""Implements what the Qwen vision families share: pictures and frames cut into merged patches, M-RoPE, vision towers,
and a text half.

A family consists of a `Layout` (the names in its config files, transformers' defaults, the times of a video's steps,
and its handling of sound) and a `Checkpoint` (its transformers classes). `config`, `image_options`, `video_options`,
`video_plan`, `video_time`, `prompt`, `positions` and `family` are pure; `preprocess` and `video_frames` use numpy and
Pillow; `checkpoint`, `encoder` and `language_model` use torch. The package knows nothing of requests and queues.
"""
