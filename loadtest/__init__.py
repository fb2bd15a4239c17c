"""Measures speed and memory: `benches` holds the benchmarks of `weft bench`, and `results` the newest result of each.

Of Weft's folders, only `deploy` imports this one, for the command line. The benchmarks may use every part of Weft.
"""
