"""What the Qwen vision families share: pictures cut into merged patches, M-RoPE, a tower and a text half.

A family is a `Layout` (what its config files call things, and transformers' defaults) and a `Checkpoint` (its
transformers classes). Pure: `config`, `image_options`, `positions`, `family`; numpy and Pillow: `preprocess`; torch:
`checkpoint`, `encoder`, `language_model`.
"""
