"""Measures speed and memory: `benches` holds the benchmarks of `weft bench`, and `results` the newest result of each.
`load` and `locustfile.py` put load on a running cluster. `simulator` runs a cluster of any size on a virtual clock
(`weft simulate`). `report_page` writes the pages of both.

Of Weft's folders, only `deploy` imports this one, for the command line. The benchmarks may use every part of Weft.
"""
