"""The experiment file: its schema, how it is read, and the plain form that is written beside results."""

from __future__ import annotations

from sim.config.load import load_experiment, parse_experiment
from sim.config.schema import Experiment

__all__ = ["Experiment", "load_experiment", "parse_experiment"]
