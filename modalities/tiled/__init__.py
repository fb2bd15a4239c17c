"""What LLaVA, LLaVA-OneVision and InternVL share: pictures become square tiles of one size, each encoded alone by a
plain vision transformer; positions run on one axis; the text half is a plain causal language model.

A family says how a picture is cut (`Tiling`) and how the tiles' features become rows. Pure: `config`, `family`; numpy
and Pillow: the tilings; torch: `encoder`.
"""
