"""Defines which media a model accepts and how it processes them: a plugin for each modality, and a folder for each
model family. Text is a modality too.

The pure parts (plans, counts, positions, text) import neither torch nor transformers. The code that runs a model is in
modules of its own (`encoder.py` and `language_model.py` of a family), which only the functions `Family.load_*` import.
"""
