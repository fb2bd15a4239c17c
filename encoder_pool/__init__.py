"""Runs the encoder pool, which turns media bytes into features and announces them to workers unit by unit.

`encoder_service` is what a replica runs, with the settings of `encoder_config`. `pipeline` leads each medium through
the encoder: `decoder` decodes it in processes (whose side is `decode_process`), `device_queue` keeps the forward pass
busy, and `forward` computes it with torch, on `device_streams`. `encode_call` keeps an open call and announces its
units to the worker. `calibration` tests and measures a model at start.
`planning/` makes the decisions and is pure.

`deploy` builds the service from the cluster's config; routers reach it through a pool of encoders, and workers read its
features. The package knows nothing of prompts, the meaning of tokens, the internals of workers, or Ray.
"""
