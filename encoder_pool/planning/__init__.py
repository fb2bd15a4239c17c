"""Every decision of the encoder pool, without torch, Ray or a clock of its own.

`lifecycle` (states of a feature), `features` (arena, leases, eviction), `flights` (single flight), `batcher` (order
and batches), `cost` (what a forward takes), `feature_log` (what routers are told).
"""
