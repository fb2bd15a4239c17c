"""Runs the encoder pool, which turns media bytes into features and announces them to workers unit by unit.

`planning/` makes the decisions and is pure. `decode` (processes) and `forward` (torch) do the work. `pipeline` leads
each medium through them, `device_queue` keeps the forward pass busy, and `service` is what a replica runs. The package
knows nothing of prompts, the meaning of tokens, the internals of workers, or Ray.
"""
