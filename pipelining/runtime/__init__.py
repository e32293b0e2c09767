"""Run programs: actors that walk their instructions, channels between them, a driver that starts a step.

`local` is the one that exists: actors are threads of one process.  A runtime decides nothing: what runs when, what is
sent where and what is freed stands in the program.
"""
