"""Measures speed and memory: `benches` holds the benchmarks of `weft bench`, and `results` the newest result of each.
`load` and `locustfile.py` put load on a running cluster. `simulator` runs a cluster of any size on a virtual clock
(`weft simulate`). `bench_result` defines what a bench returns and where it goes, and `report_page`
writes pages.

Of Weft's folders, only `deploy` imports this one, for the command line. The benchmarks may use every part of Weft.
"""
