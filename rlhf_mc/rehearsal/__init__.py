"""A run of any size, rehearsed in one process: what its ranks would build and plan, and whether they agree.

No kernels, bytes or peers. Start it with python -m rlhf_mc.rehearsal; docs/rehearsal.md says how to read what it prints. The
parts that a run plans with are the same functions; what is new here are the fake world, the stopwatch and the comparisons. May import
all but train and launch; no engine is imported.
"""
