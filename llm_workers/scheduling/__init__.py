"""Makes every decision of the engine: what to compute next, in which blocks, and from which features.

The code here is pure. It follows one rule: the computed tokens of a sequence catch up with its total tokens.
`Scheduler` is the entry point, and `plan` describes the steps that it hands out. This package knows nothing of tensors
and sockets.
"""
