"""What a model can take and how: a plugin per modality, a folder per model family, text as a modality too.

Pure parts (plans, counts, positions, text) import neither torch nor transformers; what runs a model does so in
modules of its own (`encoder.py`, `language_model.py` of a family), loaded by `Family.load_*` only.
"""
