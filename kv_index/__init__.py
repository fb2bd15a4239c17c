"""Which worker holds which prefix of KV blocks, which encoder holds which features. Pure; knows no policy."""
