"""Profiles: where a GPU's curves come from. `auto` takes a measured folder for the GPU if there is one, else `spec`.

A profile folder holds `profile.yaml` (`sim.cost.profile_schema`), `measurements/` (raw medians) and one file
per curve. Operators that a folder has no curve for fall back to the spec profile, under its label.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml

from sim.cost.activity import Activity, load_activity
from sim.cost.base import Curve, EnergyTerms, HostTerms
from sim.cost.collectives import Collectives
from sim.cost.collectives_file import load_collectives
from sim.cost.gpu import GpuSpec
from sim.cost.measured import load_curve, read_curves
from sim.cost.measured_contention import MeasuredContention, load_contention
from sim.cost.measured_fused import FusedSurface, load_fused
from sim.cost.measured_steps import Composition, composition_from_data
from sim.cost.profile_schema import CurveEntry, known_keys, read_schema
from sim.cost.spec import RooflineCurve, roofline
from sim.errors import SimctlError
from sim.suggest import nearest

T = TypeVar("T", HostTerms, EnergyTerms)

SPEC_RULE = "roofline with waves"
# operator family -> section of spec.yaml
SECTIONS = {
    "gemm": "gemm",
    "gemm/fp8": "gemm",
    "moe": "experts",
    "moe/fp8": "experts",
    "routing": "elementwise",
    "quantise": "elementwise",
    "lm_head": "gemm",
    "prefill_attention": "prefill_attention",
    "decode_attention": "decode_attention",
    "norm": "elementwise",
    "rope": "elementwise",
    "activation": "elementwise",
    "kv_write": "elementwise",
    "embedding": "elementwise",
    "sampling": "sampling",
}


@dataclass(frozen=True)
class CurveProfile:
    """A profile whose curves are all loaded; `curves` may hold a family (`gemm`) or a variant (`gemm/qkv`).

    `composition`: whole steps against the sum of operators; `contention`: measured slowdowns side by side (None: the
    analytic guess); `fused`: attention of mixed batches against separate kernels (None: a model); `collectives`: of
    several GPUs of a machine (None: rings by the data sheet); `activity`: SM-seconds by counters (None: by the curves'
    forms). `jitter_sd`: sd of the logarithm of a step's time between
    repeats (kernel times of public tables vary by 0.9-1.1 %).
    """

    name: str
    gpu: GpuSpec
    content_hash: str
    curves: Mapping[str, Curve]
    host: HostTerms
    energy: EnergyTerms
    contention: MeasuredContention | None = None
    fused: FusedSurface | None = None
    composition: Composition | None = None
    jitter_sd: float = 0.01
    collectives: Collectives | None = None
    activity: Activity | None = None

    def curve(self, operator: str) -> Curve:
        """The curve of an operator, by full name or by family."""
        found = self.curves.get(operator) or self.curves.get(operator.split("/")[0])
        if found is None:
            raise SimctlError(f"Profile '{self.name}' has no curve for '{operator}'.")
        return found


@cache
def _spec_data() -> dict[str, Any]:
    text = files("sim").joinpath("data/profiles/spec.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def spec_terms(gpu: GpuSpec) -> dict[str, Any]:
    """The spec profile's parameters for a GPU: the defaults with the GPU's own values on top."""
    data = _spec_data()
    own = data.get(gpu.name) or {}
    merged: dict[str, Any] = {}
    for section, values in data["default"].items():
        over = own.get(section)
        merged[section] = {**values, **(over or {})} if isinstance(values, dict) else over or values
    return merged


def spec_profile(gpu: GpuSpec) -> CurveProfile:
    """The analytic profile of a GPU."""
    terms = spec_terms(gpu)
    label = f"extrapolated from {terms['source']} by {SPEC_RULE}"
    curves = {
        family: RooflineCurve(gpu, roofline(terms[section], f"spec.yaml, {section}"), label)
        for family, section in SECTIONS.items()
    }
    return CurveProfile(
        name=f"spec:{gpu.name}",
        gpu=gpu,
        content_hash=digest({"gpu": asdict(gpu), "terms": terms}),
        curves=curves,
        host=HostTerms(**terms["host"], label="extrapolated from first H200 measurements by assumption"),
        energy=spec_energy(gpu, terms),
    )


def spec_energy(gpu: GpuSpec, terms: Mapping[str, Any]) -> EnergyTerms:
    """Energy coefficients from two states: the best GEMM and the best stream draw their shares of the TDP."""
    gemm_rate = gpu.peak_flops * terms["gemm"]["efficiency"]
    stream_rate = gpu.hbm_bytes_per_s * terms["gemm"]["bandwidth_efficiency"]
    share = terms["energy"]
    return EnergyTerms(
        idle_w=gpu.idle_w,
        j_per_flop=(share["gemm_power"] * gpu.tdp_w - gpu.idle_w) / gemm_rate,
        j_per_byte=(share["stream_power"] * gpu.tdp_w - gpu.idle_w) / stream_rate,
        cap_w=gpu.tdp_w,
        label="extrapolated from first H200 measurements by shares of the TDP",
    )


def digest(content: Any) -> str:
    """SHA-256 of a JSON-like value, independent of key order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of all files of a profile folder."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _roofline_form(path: Path, entry: CurveEntry, gpu: GpuSpec) -> Curve:
    """Parameters of the spec profile's form, fitted or measured: a YAML mapping."""
    terms = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(terms, dict):
        raise SimctlError(f"{path} must hold a mapping of the roofline's parameters.")
    section = spec_terms(gpu)[SECTIONS[entry.operator.split("/")[0]]]
    return RooflineCurve(
        gpu, roofline({**section, **terms}, str(path)), entry.label, entry.coverage, entry.extrapolation
    )


# form -> loader of (file, entry, GPU)
LOADERS: dict[str, Callable[[Path, CurveEntry, GpuSpec], Curve]] = {
    "roofline": _roofline_form,
    "measured": load_curve,
}


def load_folder(folder: Path, gpu: GpuSpec) -> CurveProfile:
    """The profile of a folder, over the spec profile; refuses one that was made for another GPU."""
    schema = read_schema(folder)
    if schema.gpu != gpu.name:
        raise SimctlError(
            f"Profile '{folder}' is for {schema.gpu}, not for {gpu.name}; use profile: auto or one for {gpu.name}."
        )
    base = spec_profile(gpu)
    curves = dict(base.curves)
    for entry in schema.curves:
        path = folder / entry.file
        if not path.is_file():
            raise SimctlError(f"{folder / 'profile.yaml'}: curve file '{entry.file}' does not exist.")
        curves[entry.operator] = LOADERS[entry.form](path, entry, gpu)
    where = str(folder / "profile.yaml")
    return CurveProfile(
        name=schema.name,
        gpu=gpu,
        content_hash=digest([base.content_hash, folder_hash(folder)]),
        curves=curves,
        host=_overlay(base.host, schema.host, f"{where}, host"),
        energy=_overlay(base.energy, schema.energy, f"{where}, energy"),
        contention=_contention(folder, schema.contention, gpu),
        fused=_fused(folder, schema.fused),
        composition=_composition(folder, schema.steps),
        jitter_sd=float(schema.steps.get("jitter_sd", CurveProfile.jitter_sd)),
        collectives=_collectives(folder, schema.collectives),
        activity=_activity(folder, schema.activity, gpu),
    )


def _composition(folder: Path, steps: Mapping[str, Any]) -> Composition | None:
    if not steps:
        return None
    path = folder / steps["file"]
    if not path.is_file():
        raise SimctlError(f"{folder / 'profile.yaml'}: curve file '{steps['file']}' does not exist.")
    found = read_curves(path).get("composition")
    return composition_from_data(found, steps["label"], f"{path}, composition") if found else None


def _contention(folder: Path, entry: Mapping[str, Any], gpu: GpuSpec) -> MeasuredContention | None:
    if not entry:
        return None
    return load_contention(folder / entry["file"], gpu, entry["label"], entry.get("coverage", ""))


def _fused(folder: Path, entry: Mapping[str, Any]) -> FusedSurface | None:
    return load_fused(folder / entry["file"], entry["label"], entry.get("coverage", "")) if entry else None


def _activity(folder: Path, entry: Mapping[str, Any], gpu: GpuSpec) -> Activity | None:
    if not entry:
        return None
    return load_activity(folder / entry["file"], gpu, entry["label"], entry.get("coverage", ""))


def _collectives(folder: Path, entry: Mapping[str, Any]) -> Collectives | None:
    if not entry:
        return None
    return load_collectives(folder / entry["file"], entry["label"], entry.get("coverage", ""))


def _overlay(base: T, values: Mapping[str, Any], where: str) -> T:
    known = asdict(base)
    known_keys(values, tuple(known), where)
    if values and "label" not in values:
        raise SimctlError(f"{where}: key 'label' is missing; say where the values are from.")
    return type(base)(**{**known, **values})


def find_folder(name: str) -> Path:
    """The folder of a profile by built-in name or path; SimctlError with the nearest name otherwise."""
    folders = builtin_folders()
    path = folders.get(name, Path(name).expanduser())
    if not (path / "profile.yaml").is_file():
        raise SimctlError(
            f"Unknown profile '{name}'.{nearest(name, folders)} "
            "Give a built-in name (`simctl profile list`) or a folder with a profile.yaml."
        )
    return path


def builtin_folders() -> dict[str, Path]:
    """Profile folders that travel with the package, by name."""
    root = Path(str(files("calib").joinpath("profiles")))
    return {path.parent.name: path.parent for path in sorted(root.glob("*/profile.yaml"))}


def load_profile(name: str, gpu: GpuSpec) -> CurveProfile:
    """The profile of that name (`auto`, `spec`, a built-in one) or folder, for that GPU."""
    folders = builtin_folders()
    if name == "auto":
        fitting = [folder for folder in folders.values() if read_schema(folder).gpu == gpu.name]
        return load_folder(fitting[-1], gpu) if fitting else spec_profile(gpu)
    if name in ("spec", f"spec:{gpu.name}"):
        return spec_profile(gpu)
    if name in folders:
        return load_folder(folders[name], gpu)
    path = Path(name).expanduser()
    if (path / "profile.yaml").is_file():
        return load_folder(path, gpu)
    raise SimctlError(
        f"Unknown profile '{name}'.{nearest(name, ['auto', 'spec', *folders])} "
        "Give 'auto', 'spec', a built-in name or a folder with a profile.yaml."
    )
