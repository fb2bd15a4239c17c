"""Defines which media a model accepts and how it processes them. Text is a modality too.

`family` is the interface of a model family, the contract between a checkpoint and the rest of Weft, and `families`
holds the implementations. `media` reads files: it has a plugin for each modality, and the arithmetic that all families
share. `text` converts between text and token ids, and `answers` says how models write reasoning and calls of tools.
`registry` finds plugins and families by name, also those of installed packages, and `probing` reads the headers of
untrusted files in helper processes. `checkpoint_files` reads a checkpoint's JSON files and `checkpoint_tensors` its
weights, of which `loading_progress` says how much is read; `adapter_files` reads LoRA adapters of it; `pixel_options`
says how its pictures are normalised, and `speech_traits` how it speaks. `torch_dtypes`, `device_copies`,
`slot_tensors`, `packed_attention` and `video_features` serve the modules that run models.

The router plans media and expands prompts, encoders preprocess and encode, and workers load language models, all
through a `Family`. The pure parts (plans, counts, positions, text) import neither torch nor transformers. The code that
runs a model is in modules of its own, which only the functions `load_*` of a family import. The folder knows nothing of
requests, queues and processes other than the helpers for probing.
"""
