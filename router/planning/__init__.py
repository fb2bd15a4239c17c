"""Decides where a request goes, and why. Its decisions are pure functions of frozen views. Only `cluster` has a memory;
nothing in this package has a clock, a socket or a random source of its own."""
