"""Time and state: SimPy's clock, replicas as plain arrays, routers. Knows no kernel and no policy by name."""

from sim.engine.cluster import simulate
from sim.engine.records import RunRecords
from sim.engine.routers import ROUTERS
from sim.engine.view import Batch, Decode, Mixed, Plan, Prefill, View

__all__ = ["ROUTERS", "Batch", "Decode", "Mixed", "Plan", "Prefill", "RunRecords", "View", "simulate"]
