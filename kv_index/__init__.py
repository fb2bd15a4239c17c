"""Records which worker holds which prefix of KV blocks, and which encoder holds which features. It is pure and knows
nothing of any policy."""
