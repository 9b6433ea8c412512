"""The page that tells what a measured profile shows, made from its files: `python -m calib.report FOLDER -o PAGE`."""

from __future__ import annotations

from calib.report.data import Profile, load
from calib.report.page import render, write

__all__ = ["Profile", "load", "render", "write"]
