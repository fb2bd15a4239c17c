"""Every decision of the engine: what to compute next, in which blocks, from which features. Pure.

One rule: computed tokens catch up with total tokens. `Scheduler` is the door; `plan` is what leaves it.
"""
