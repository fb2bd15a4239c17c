"""Holds what every part of Weft shares, and nothing of what any single part does.

`contracts` defines what the parts tell each other: ids, calls, messages, errors, clocks and the arithmetic of costs.
`transport` moves it: features through the feature channel, messages through the message plane, and the leases that say
who is a member. `sandbox` runs code on a client's bytes in a process that may be killed. `c_library` compiles and loads
the C sources of other packages, which include `vectors.h` and `structures.h`; `c_structures` passes numpy arrays to
them. `ranked_heap` keeps items in an order that changes. `process_meter` reads what a process takes of its machine. The
package knows nothing of models, of the meaning of requests, of Ray or of HTTP.
"""
