"""The encoder pool: media bytes to features, announced to workers unit by unit.

`planning/` decides (pure), `decode` and `forward` work (processes, torch), `pipeline` leads a medium through them and
`lane` keeps the forward busy, `service` is what a replica runs. Knows nothing of prompts, tokens' meaning, workers'
insides or Ray.
"""
