"""How fast the simulator is: `python -m benchmarks` measures, prints a table and can rewrite docs/speed.md.

Every measurement is a `simctl run` in a process of its own, as a user would start it, on experiments that are plain
YAML beside this file. Times of the loop come from the run's `timing.json`, the rest from the operating system.
"""
