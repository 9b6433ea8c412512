"""The JSON Schema that editors use is the one the code validates by."""

from __future__ import annotations

import json
from importlib.resources import files

from sim.config.resolve import json_schema
from sim.config.schema import Experiment


def test_published_schema_is_current() -> None:
    """Regenerate: python -c "from sim.config.resolve import json_schema; print(json_schema(), end='')"."""
    assert (files("sim") / "data" / "experiment.schema.json").read_text() == json_schema()


def test_published_schema_knows_every_key_and_forbids_others() -> None:
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(Experiment.model_fields)
    assert schema["additionalProperties"] is False
    assert {"workload", "model", "gpu", "policies"} == set(schema["required"])
