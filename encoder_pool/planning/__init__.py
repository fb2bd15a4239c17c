"""Every decision of the encoder pool, without torch, Ray or a clock of its own.

`admission` (what is refused), `flights` (single flight), `batcher` (order and batches), `forward_job` (one forward),
`features` (arena, leases, eviction), `lifecycle` (states of a feature), `cost` (what a forward takes), `feature_log`
(what routers are told).
"""
