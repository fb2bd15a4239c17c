"""What the Qwen vision families share: pictures and frames cut into merged patches, M-RoPE, towers and a text half.

A family is a `Layout` (what its config files call things, transformers' defaults, when the steps of a video are, how it
hears) and a `Checkpoint` (its transformers classes). Pure: `config`, `image_options`, `video_options`, `video_plan`,
`video_time`, `prompt`, `positions`, `family`; numpy and Pillow: `preprocess`, `video_frames`; torch: `checkpoint`,
`encoder`, `language_model`.
"""
