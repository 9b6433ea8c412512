"""The description of a trace format: names of its columns and units, no code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TraceFormat:
    """How one tool writes requests down.

    `prompt`, `output` and `arrival` are its column names; `optional` maps our names (`max_new_tokens`,
    `slo_class`, `priority`, `session_id`, `prefix_hashes`) to its. `arrival_required`: False where files
    without arrivals exist. `time_unit` is the usual unit of numeric stamps, `unit_stated` whether the format
    leaves no doubt of it. `known` lists further columns that it usually has and that are not used; `needs`
    columns tell it from, and `unlike` columns give it over to, another format with the same names; `refuse`
    maps a column that cannot be represented to the reason. `zero_means` says what a row of zero tokens is.
    `block_tokens` is the block of `prefix_hashes`.
    """

    name: str
    title: str
    source: str
    prompt: str
    output: str
    arrival: str | None
    arrival_required: bool = True
    time_unit: str | None = None
    unit_stated: bool = False
    optional: Mapping[str, str] = field(default_factory=dict)
    known: Collection[str] = ()
    needs: Collection[str] = ()
    unlike: Collection[str] = ()
    refuse: Mapping[str, str] = field(default_factory=dict)
    zero_means: str = "requests without tokens"
    block_tokens: int | None = None

    def fits(self, names: Collection[str]) -> bool:
        """True if a table with these case-folded column names can be of this format."""
        need = [self.prompt, self.output, *self.needs]
        if self.arrival is not None and self.arrival_required:
            need.append(self.arrival)
        alien = any(column.casefold() in names for column in self.unlike)
        refused = any(column.casefold() in names for column in self.refuse)
        return not alien and (refused or all(column.casefold() in names for column in need))

    def score(self, names: Collection[str]) -> int:
        """How many of the columns this format knows by name are there."""
        mine = [
            self.prompt,
            self.output,
            self.arrival or "",
            *self.optional.values(),
            *self.known,
            *self.refuse,
        ]
        return sum(column.casefold() in names for column in mine)

    def order(self) -> list[str]:
        """The usual order of the columns, for a remark when a file has another."""
        return [column for column in (self.arrival, self.prompt, self.output) if column]
