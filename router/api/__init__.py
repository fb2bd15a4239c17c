"""Holds OpenAI's HTTP formats: it reads requests, and writes responses, chunks and errors. It knows nothing of how
requests are served.
"""
