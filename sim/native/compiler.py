"""The compiling process: numba turns a hot function and all that it calls into one object file.

numba's own optimiser would run over every function with all its callees, again at each level; so it is off, and LLVM
optimises the finished whole once. No fastmath, no contraction of a multiplication and an addition: results equal
CPython's to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sim.native.store import ENTRY, target_machine

OPTIONS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "python"}
SPEED_LEVEL = 3


def main(job: Mapping[str, Any]) -> None:
    """Compile each (module, name, arguments, output file) of `job["entries"]`."""
    os.environ |= {"NUMBA_OPT": "0", "NUMBA_DISABLE_JIT": "0"}
    import numba

    from sim import jit

    jit.decorator = numba.njit(**OPTIONS)  # before any hot module is imported
    from sim.native.numba_types import type_of

    for module, name, arguments, output in job["entries"]:
        function = getattr(import_module(module), name)
        signature = tuple(type_of(argument) for argument in arguments)
        function.compile(signature)
        made = function.overloads[signature]
        code = _optimised(made.library.get_llvm_str(), made.fndesc.llvm_func_name)
        waiting = Path(output).with_suffix(f".{os.getpid()}.tmp")
        waiting.write_bytes(code)
        os.replace(waiting, output)


def _optimised(text: str, name: str) -> bytes:
    """One module's object code, in which only the function called `name` can be seen, as ENTRY."""
    import llvmlite.binding as llvm

    machine = target_machine()
    module = llvm.parse_assembly(text)
    for function in module.functions:
        if function.is_declaration:
            # anything but an intrinsic would have to be found again by whoever loads the code
            assert function.name.startswith("llvm."), f"{function.name} is not in the module"
        elif function.name == name:
            function.name = ENTRY
        else:
            function.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=SPEED_LEVEL)
    options.loop_vectorization = False  # loops here run over a few requests
    options.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    code: bytes = machine.emit_object(module)
    return code
