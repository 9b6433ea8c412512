"""What papers measured of whole systems, run through the simulator: one module a paper, each with a function of checks.

GPUs are those of the papers, priced by their data sheets, since nobody has measured them for this project; loads are
drawn at the lengths that the papers state, or at such as are named where they state none. Checks of kernels and
chunks are in `sim.cost.pod_checks`.
"""
