"""LLM workers: the engine (scheduling, paged attention, sampling), the intake of features, and the service around them.

service     calls, messages, reports        engine     the thread: plan -> execute -> commit
receiver    pulls what `intake` decides     runner     one step on the model
"""
