"""The plans of the simulator's own policies, run as real kernels against the wall clock.

`serve` drives a policy's compiled loop and the engine's state exactly as the simulator does, and replaces one thing:
when a launch ends is what the device says. So the scheduler that is validated is the scheduler that is simulated.
"""
