"""Runs vLLM as the engine of a worker, without a patch to it.

    core_engine         the engine thread: commands in, steps of vLLM's engine core, updates out
    engine_args         makes vLLM's config, and refuses options that Weft decides
    model_overrides     completes the configs of models where vLLM needs more than transformers
    engine_requests     makes requests of vLLM; `engine_outputs` makes plain values of what it reports
    sequence_book       keeps tokens, times and numbers of each sequence
    feature_board       knows which features are here and which sequence waits for which
    doorstep_scheduler  makes vLLM's scheduler stop where a feature is missing
    feature_connector   copies features from a rank's inbox into vLLM's encoder cache
    rank_inboxes        pulls each feature into an inbox of every rank
    rank_extension      makes ranks take positions and sent tokens from requests, and checks what they apply of adapters
    shared_names        removes the names of shared memory, so that a killed worker leaves none behind
    patient_waits       lets the engine core sleep while ranks on a CPU compute
    block_mirror        hashes vLLM's blocks as Weft does, and mirrors its prefix cache
    guide_grammar       lets vLLM follow Weft's grammars

vLLM needs an environment of its own (`make install-vllm`), in which Ray starts the worker's process. This package is
imported nowhere else; of it, only `engine_args`, `model_overrides`, `sequence_book`, `feature_board`, `rank_inboxes`,
`block_mirror`, `patient_waits` and `shared_names` can be imported without vLLM.
"""
