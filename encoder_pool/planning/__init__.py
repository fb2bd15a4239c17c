"""Every decision of the encoder pool, without torch, Ray or a clock of its own.

`admission` (what is refused), `flight` and `flights` (single flight), `turns` (who is first in line), `batcher` (what
goes into a forward), `forward_job` (one forward), `features` (arena, leases, eviction), `lifecycle` (states of a
feature), `cost` (what a forward takes), `sizes` (what inputs take in memory), `tally` (sums for reports), `feature_log`
(what routers are told).
"""
