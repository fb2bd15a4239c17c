"""Contains the LLM worker: the engine, the intake of features, and the service around both.

The engine schedules steps, runs paged attention and samples tokens. The most important modules have these tasks:
  service     handles calls, messages and reports
  engine      runs the thread that repeats plan -> execute -> commit
  receiver    pulls the features that `intake` selects
  runner      executes one step on the model
"""
