"""Contracts and transport: what every part of Weft shares, and nothing of what any part does.

Contracts: `ids`, `messages`, `errors`, `digest`, `clock`. Transport: `arena`, `channel` (features),
`plane` (messages). Knows nothing of models, requests' meaning, Ray or HTTP.
"""
