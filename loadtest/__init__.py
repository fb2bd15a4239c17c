"""Measures speed and memory: `benches` holds the benchmarks of `weft bench`, and `results` the newest result of each.
`simulator` runs a cluster of any size on a virtual clock (`weft simulate`).

Of Weft's folders, only `deploy` imports this one, for the command line. The benchmarks may use every part of Weft.
"""
