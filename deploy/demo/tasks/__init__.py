"""Lists what the demo model can do, as tasks that draw conversations with one right answer.

`pictures`, `watched` (clips), `heard` (sounds) and `words` (no media) draw the conversations of single tasks. `lessons`
draws conversations with several questions for each medium, for training only. `catalogue` lists all tasks, and the
stages of training that teach them.

Training, measuring and `weft demo` take their tasks from `catalogue`. The folder knows no model.
"""
