"""What belongs to a run's window: the time over which rates and percentiles are taken."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.engine.records import RunRecords


def requests_in(records: RunRecords) -> pd.DataFrame:
    """The requests that arrived in the window."""
    inside = records.requests["arrival_s"].between(*records.window_s)
    return records.requests if inside.all() else records.requests[inside]


def gaps_in(records: RunRecords) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Gaps between tokens, in seconds, of which the later token appeared in the window; and how often each occurred."""
    start, end = records.window_s
    inside = (records.itl_end_s > start) & (records.itl_end_s <= end)
    if inside.all():  # no copies of what may be tens of millions of rows
        return records.itl_s, records.itl_count
    return records.itl_s[inside], records.itl_count[inside]
