"""Audio towers: what a sound becomes in each family, and the encoders themselves.

Pure: `cutting` (where a spectrogram may be cut), `sound` (a family's half for sounds), `halves` (that of each family,
from its config). Torch: `encoder` and a module per tower.
"""
