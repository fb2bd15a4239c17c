"""Where a request goes, and why: pure decisions on frozen views. `cluster` alone has a memory; nothing here has a
clock, a socket or a random source of its own."""
