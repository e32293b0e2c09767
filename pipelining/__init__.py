"""A train step becomes one program for each pipeline rank, and runs.

In: a function that calls `accumulate_grads` once, a mesh, a schedule.  Out: the same function, pipelined.  README.md
beside this file draws the way; models, data and files are not here.
"""
