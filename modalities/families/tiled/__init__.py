"""Holds what LLaVA, LLaVA-OneVision and InternVL share, which are called families on tiles.

A picture becomes square tiles of one size, and a plain vision transformer encodes each tile alone. Positions run on one
axis. The text half is a plain causal language model. `tiled_family` is the family, with the reading of its config files
and the handling of videos. `tile_encoders` loads and runs the vision towers and projectors of the three families.

Each family's own module (`llava`, `llava_onevision`, `internvl`) defines how a picture is cut (`Tiling`), and builds a
`TiledFamily` from that. `tiled_family` imports torch only when it loads. The package knows nothing of requests and
queues.
"""
