"""One workload on the real GPU and in the simulator, under the same scheduler code: measured, replayed, compared."""
