"""Holds what LLaVA, LLaVA-OneVision and InternVL share, which are called families on tiles.

A picture becomes square tiles of one size, and a plain vision transformer encodes each tile alone. Positions run on one
axis. The text half is a plain causal language model. Each family defines how a picture is cut (`Tiling`) and how the
features of the tiles become rows. `config` and `family` are pure, the tilings need numpy and Pillow, and `encoder`
needs torch. This package knows nothing of a particular family.
"""
