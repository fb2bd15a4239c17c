"""One worker on several ranks. Rank 0 is the worker that everybody knows: scheduler, inbox, splice, sampling, plane.
The others hold their share of each layer's weights and KV heads and run the same forward (docs/adr/0003)."""
