"""Contains the LLM worker: the engine, the store of features, and the service around both.

The engine schedules steps, runs paged attention and samples tokens. The most important modules have these tasks:
  service     handles calls, messages and reports
  engine      runs the thread that repeats plan -> execute -> commit
  features    pulls features, holds them, and hands references to the engine
  runner      executes one step on the model
"""
