"""A profile folder as tables, and the selections that several sections share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from calib.rows import read_table
from sim.errors import SimctlError

NEARLY_AS_MANY = 0.9  # of the sizes of the best covered shape
SHAPE = ("kind", "label", "attention", "layers", "m", "q_tokens", "history_tokens", "decode_batch")
SHAPE += ("context_sum", "context_max")


@dataclass(frozen=True)
class Profile:
    """`run`: run.yaml; `tables`: measured rows by sweep; `about`, `energy`: what profile.yaml says of its fits and of
    watts, if anything."""

    name: str
    run: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame]
    about: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    energy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sms(self) -> int:
        """SMs of the whole GPU."""
        return int(self.run["gpu"]["sms"])

    def timed(self, sweep: str) -> pd.DataFrame:
        """Rows of `sweep` that have a time, every column a section may ask for present; empty if not measured."""
        table = self.tables.get(sweep, pd.DataFrame()).copy()
        for name in (*SHAPE, "sms", "time_s", "p25_s", "p75_s", "bytes", "flops", "sm_mhz", "power_w"):
            if name not in table:
                table[name] = float("nan")
        for name in ("throttled", "count", "launch", "decode_contexts", "context_mean"):
            if name not in table:
                table[name] = float("nan")
        return table[table.time_s.notna()].reset_index(drop=True)


def load(folder: Path) -> Profile:
    """The profile in `folder`; raises SimctlError if it has no readable run.yaml or no measurements."""
    run = _yaml(folder / "run.yaml")
    if not isinstance(run.get("gpu"), dict) or "sms" not in run["gpu"]:
        raise SimctlError(f"{folder / 'run.yaml'} must say gpu: with sms:, as a calibration run writes it.")
    paths = sorted((folder / "measurements").glob("*.csv.gz"))
    if not paths:
        raise SimctlError(f"{folder / 'measurements'} holds no *.csv.gz: calibrate first.")
    tables = {}
    for path in paths:
        try:
            tables[path.name.removesuffix(".csv.gz")] = read_table(path)
        except (OSError, ValueError, EOFError) as error:
            raise SimctlError(f"{path} is not a readable table of measurements: {error}.") from error
    fitted = folder / "profile.yaml"
    made = _yaml(fitted) if fitted.exists() else {}
    about, energy = (found if isinstance(found := made.get(key), dict) else {} for key in ("about", "energy"))
    return Profile(folder.resolve().name, run, tables, about, folder, energy)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SimctlError(f"{path} is not readable: {error}.") from error
    if not isinstance(content, dict):
        raise SimctlError(f"{path} must hold a mapping.")
    return content


def by_shape(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Rows of the same work on different partition sizes, one frame a shape, ascending in SMs."""
    for _, rows in table.groupby([*SHAPE, "bytes"], dropna=False, sort=True):
        yield rows.drop_duplicates("sms").sort_values("sms")


def best_covered(table: pd.DataFrame, whole: int) -> pd.DataFrame:
    """Rows of one shape against SMs: of the shapes on the whole GPU that nearly as many sizes are measured of as
    of any, the one with the most work (longest on the whole GPU). Empty if there is none."""
    found = [rows for rows in by_shape(table) if whole in set(rows.sms) and len(rows) > 1]
    if not found:
        return table.iloc[:0]
    most = max(map(len, found))
    wide = [rows for rows in found if len(rows) >= NEARLY_AS_MANY * most]
    return max(wide, key=lambda rows: float(rows.loc[rows.sms == whole, "time_s"].iloc[0]))


def single_chunks(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of one prefill chunk, with its tokens as numbers `q` and `h`."""
    text = table.q_tokens.astype("string")
    one = table[text.notna() & ~text.str.contains(";", na=True)].copy()
    one["q"] = one.q_tokens.astype(float).astype(int)
    one["h"] = one.history_tokens.astype(float).astype(int)
    return one


def looked_up(table: pd.DataFrame, keys: Sequence[str]) -> dict[tuple[Any, ...], float]:
    """Median time by `keys`."""
    return {
        key if isinstance(key, tuple) else (key,): float(rows.median())
        for key, rows in table.groupby(list(keys)).time_s
    }
