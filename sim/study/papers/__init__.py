"""What papers measured of whole systems, run through the simulator: one module a paper, each with functions of checks.

GPUs are those of the papers, priced by their data sheets, since nobody has measured them for this project; loads are
drawn at the lengths that the papers state, or at such as are named where they state none. Checks of kernels and
chunks are in `sim.cost.pod_checks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from sim.cost.pod_checks import Check


@dataclass(frozen=True)
class Group:
    """Checks that share their runs: `target` is their function, `seconds` about what they take."""

    target: str
    title: str
    seconds: int

    def function(self) -> Callable[[], list[Check]]:
        """What runs them."""
        module, _, name = self.target.partition(":")
        found: Callable[[], list[Check]] = getattr(import_module(module), name)
        return found

    def checks(self) -> list[Check]:
        """Run them."""
        return self.function()()


HERE = "sim.study.papers"
GROUPS: dict[str, Group] = {
    "pod-kernels": Group("sim.cost.pod_checks:all_checks", "POD-Attention's kernels, Sarathi's chunks", 3),
    "bullet": Group(f"{HERE}.bullet:chat_checks", "Bullet against SGLang on ShareGPT", 15),
    "bullet-static": Group(f"{HERE}.bullet:static_checks", "Bullet against fixed SM sets", 3),
    "bullet-ablation": Group(f"{HERE}.bullet:ablation_checks", "Bullet's partition and scheduler", 6),
    "muxwise": Group(f"{HERE}.bullet:muxwise_checks", "MuxWise against chunked prefill", 5),
    "semi-pd": Group(f"{HERE}.bullet:semi_pd_checks", "semi-PD's feedback", 12),
    "pod-offline": Group(f"{HERE}.pod:offline_checks", "POD end to end, all requests at once", 4),
    "pod-mix": Group(f"{HERE}.pod:mix_checks", "POD's gain by prompt and output lengths", 4),
    "pod-online": Group(f"{HERE}.pod:online_checks", "POD end to end, Poisson arrivals", 22),
    "pod-energy": Group(f"{HERE}.pod:energy_checks", "POD's energy of attention", 2),
    "sarathi": Group(f"{HERE}.sarathi:capacity_checks", "Sarathi-Serve's capacity", 10),
    "sarathi-ablation": Group(f"{HERE}.sarathi:ablation_checks", "Sarathi-Serve's parts", 4),
    "distserve": Group(f"{HERE}.distserve:checks", "DistServe's table and example", 5),
    "splitwise-pools": Group(f"{HERE}.splitwise:pool_checks", "Splitwise's pool sizes", 80),
    "splitwise-times": Group(f"{HERE}.splitwise:time_checks", "Splitwise's measured times", 1),
}
