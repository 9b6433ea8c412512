"""Which part may know which: arrows between packages, who writes files, who may be random or read a clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sim

ROOT = Path(sim.__file__).parent
PARTS = ("workload", "cost", "engine", "policies", "metrics", "report", "study", "config", "cli")
FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name of a source file of the package."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, lazily or not; `from a import b` is a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            for alias in node.names:
                inner = ROOT.parent / Path(*base.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
                found.add(f"{base}.{alias.name}" if is_module else base)
    return found


def files_of(part: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(ROOT).parts[0] == part]


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# part -> what it must not know
FORBIDDEN = {
    "workload": ("cost", "engine", "policies", "metrics", "report", "study", "config", "cli"),
    "cost": ("engine", "policies", "metrics", "report", "study", "config", "cli"),
    "engine": ("metrics", "report", "study", "config", "cli"),
    "policies": ("metrics", "report", "study", "config", "cli"),
    "metrics": ("policies", "report", "study", "config", "cli"),
    "report": ("engine", "policies", "cost", "workload", "study", "cli"),
    "study": ("cli",),
}


@pytest.mark.parametrize("part", list(FORBIDDEN))
def test_arrows_between_packages(part: str) -> None:
    for path in files_of(part):
        for name in imports(path):
            for other in FORBIDDEN[part]:
                assert not under(name, f"sim.{other}"), f"{module_name(path)} imports {name}"


def test_metrics_read_records_and_no_engine_objects() -> None:
    for path in files_of("metrics"):
        engine = {name for name in imports(path) if under(name, "sim.engine")}
        assert engine <= {"sim.engine.records"}, module_name(path)


def test_policies_use_the_engines_arrays_and_nothing_that_holds_time() -> None:
    allowed = {
        f"sim.engine.{name}"
        for name in (
            *("deployment", "layout", "queues", "cohort", "plans", "lane", "lanes", "view"),
            *("dispatch", "pooled"),
        )
    }
    for path in files_of("policies"):
        engine = {name for name in imports(path) if under(name, "sim.engine")}
        assert engine <= allowed, f"{module_name(path)} imports {engine - allowed}"


def test_the_engine_knows_no_policy_by_name() -> None:
    for path in files_of("engine"):
        policies = {name for name in imports(path) if under(name, "sim.policies")}
        assert policies <= {"sim.policies.base"}, module_name(path)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_simulator_needs_no_gpu_library_and_calibration_only_on_command(path: Path) -> None:
    for name in imports(path):
        for library in ("torch", "cupy", "cuda", "pynvml", "flashinfer"):
            assert not under(name, library), f"{module_name(path)} imports {name}"
        if under(name, "calib"):
            assert path.relative_to(ROOT).parts[0] == "cli", f"{module_name(path)} imports {name}"


# packages of calib that drive the simulator's own schedulers, on a device or against its log
RUN_SCHEDULERS = ("executor", "validate")


def test_calibration_knows_the_cost_model_and_only_the_executor_and_validation_what_simulates() -> None:
    calib = ROOT.parent / "calib"
    for path in sorted(calib.rglob("*.py")):
        closed = ["report", "cli"]
        if path.relative_to(calib).parts[0] not in RUN_SCHEDULERS:
            closed += ["workload", "engine", "policies", "metrics", "study", "config"]
        for name in imports(path):
            for other in closed:
                assert not under(name, f"sim.{other}"), f"{path.name} imports {name}"


def calls(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    """(line, name or attribute, call) of every call in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.lineno, node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                yield node.lineno, node.func.attr, node


WRITERS = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "touch", "unlink", "rename", "rmtree", "rmdir"),
    *("to_csv", "to_parquet", "to_json", "to_pickle", "write_html", "savez", "savez_compressed", "tofile"),
}


def opens_for_writing(name: str, call: ast.Call) -> bool:
    if name != "open":
        return False
    texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return any(set(text) <= set("rwxabt+") and set(text) & set("wxa+") for text in texts)


def test_only_commands_reports_and_studies_write_files() -> None:
    for path in FILES:
        inner = path.relative_to(ROOT)
        # machine code has a cache of its own
        if inner.parts[0] in ("cli", "report", "study", "native"):
            continue
        for line, name, call in calls(path):
            assert name not in WRITERS, f"{inner}:{line} writes: {name}"
            assert not opens_for_writing(name, call), f"{inner}:{line} opens a file for writing"


def test_only_commands_and_reports_write_to_the_terminal() -> None:
    for path in FILES:
        inner = path.relative_to(ROOT)
        if inner.parts[0] not in ("cli", "report"):
            for line, name, _ in calls(path):
                assert name not in ("print", "echo", "secho"), f"{inner}:{line} prints"


def test_randomness_comes_from_generators_that_are_passed_in_or_seeded() -> None:
    for path in FILES:
        inner = path.relative_to(ROOT)
        assert not {name for name in imports(path) if under(name, "random") or under(name, "secrets")}, inner
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("np.random", "numpy.random"):
                allowed = ("Generator", "default_rng", "SeedSequence")
                assert node.attr in allowed, f"{inner}:{node.lineno} uses the global generator: {node.attr}"
        for line, name, call in calls(path):
            if name == "default_rng":
                assert call.args or call.keywords, f"{inner}:{line} draws a seed from the operating system"


@pytest.mark.parametrize("part", ["engine", "policies", "cost", "metrics"])
def test_wall_clock_stays_out_of_simulated_time(part: str) -> None:
    for path in files_of(part):
        for name in imports(path):
            assert name not in ("time", "datetime", "timeit"), f"{module_name(path)} imports {name}"


def test_the_package_under_test_is_the_checkouts_or_an_installed_one() -> None:
    tests = Path(__file__).parent
    assert tests not in ROOT.parents
    assert {part for part in PARTS if (ROOT / part).is_dir()} == set(PARTS)


def test_there_are_no_packages_under_tests() -> None:
    assert not list(Path(__file__).parent.rglob("__init__.py"))
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
