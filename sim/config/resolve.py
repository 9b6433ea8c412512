"""The plain form of an experiment: what is written beside results, hashed, and published as a JSON Schema."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sim.config.schema import Experiment


def plain(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment as plain data with every default written out; loading it gives it back."""
    data = experiment.model_dump(mode="json", exclude={"resolved", "policies"})
    data["policies"] = [entry.plain() for entry in experiment.policies]
    mappings = ("workload", "slo", "memory", *(["model"] if isinstance(data["model"], dict) else []))
    for section in mappings:
        data[section] = {k: v for k, v in data[section].items() if v is not None}
    return {k: data[k] for k in Experiment.model_fields if data.get(k) is not None}


def resolve(
    plain_form: dict[str, Any], *, versions: dict[str, str], profile_sha256: str, trace_sha256: str
) -> dict[str, Any]:
    """Return the plain form with a `resolved` block: the versions and content hashes behind results."""
    block = {"versions": versions, "profile_sha256": profile_sha256, "trace_sha256": trace_sha256}
    return {**plain_form, "resolved": block}


def content_hash(data: Any) -> str:
    """Return the SHA-256 of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def json_schema() -> str:
    """Return the JSON Schema of the experiment file, as shipped for editors (draft 2020-12)."""
    schema = Experiment.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    schema["title"] = "simctl experiment"
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"
