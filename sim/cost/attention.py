"""How the attention of a step with both chunks and decodes runs: `kernels.attention`, and what a policy asks for."""

from __future__ import annotations

from dataclasses import dataclass

from sim.errors import SimctlError
from sim.suggest import nearest

MODES = ("serial", "streams", "hfuse", "batched", "pod")
VARIANTS = ("auto", "artefact", "flashinfer", "flashinfer-batch")
TICKETS = ("proportional", "50:50")
SPLITS = ("limited", "vanilla")


@dataclass(frozen=True)
class AttentionMode:
    """How the attention of a mixed step runs.

    `mode`: one of `MODES`. The rest is for `pod`: `variant` (`artefact`: the paper's kernel; `flashinfer`: POD over
    one prefill; `flashinfer-batch`: BatchPOD; `auto`: the paper's on compute capability 8.0, else BatchPOD), and for
    the artefact `tickets`, `split`, `ctas_per_sm` (0: by its rule), `contiguous` (KV cache not paged: vAttention).
    `speedup`: seconds of separate kernels over those of this mode, whatever the shape; 0: by the model or measurement.
    Raises SimctlError for other values.
    """

    mode: str = "serial"
    variant: str = "auto"
    tickets: str = "proportional"
    split: str = "limited"
    ctas_per_sm: int = 0
    contiguous: bool = True
    speedup: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("variant", VARIANTS), ("tickets", TICKETS), ("split", SPLITS)):
            value = getattr(self, name)
            if value not in known:
                raise SimctlError(
                    f"attention {name} '{value}' is none of {', '.join(known)}.{nearest(value, known)}"
                )
        if self.ctas_per_sm not in (0, 2, 4):
            raise SimctlError(
                f"attention ctas_per_sm is {self.ctas_per_sm}, but must be 2, 4 or 0 (by the kernel's rule)."
            )
        if self.speedup < 0:
            raise SimctlError(
                f"attention speedup is {self.speedup:g}, but must be 0 (by the model) or above."
            )

    def kernel(self, compute_capability: str) -> str:
        """The variant of `pod` that runs on a GPU."""
        if self.variant != "auto":
            return self.variant
        return "artefact" if compute_capability == "8.0" else "flashinfer-batch"


SERIAL = AttentionMode()
