"""Every decision of the engine: what to compute next, in which blocks, from which features. Pure."""
