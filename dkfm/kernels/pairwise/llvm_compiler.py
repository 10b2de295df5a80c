"""Compile functions written in LLVM's intermediate representation with llvmlite, which the extra "fast" installs.

Importing llvmlite and compiling a function takes a tenth of a second. Numba, which is built on llvmlite, would take two
seconds, and most of that even if the code is in its cache.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock

import llvmlite.binding as llvm
from llvmlite import ir

COUNT = ir.IntType(64)
"""The type of counts and of indices."""

_compiling = Lock()
"""Held while a module is written and compiled, because llvmlite's writer is not made for threads."""

# Two threads, also of numba, that fill llvmlite's table of characters read it half full. A string fills it now.
str(ir.Constant(ir.ArrayType(ir.IntType(8), 1), bytearray(1)))


def compile_function(
    build_module: Callable[[], ir.Module], name: str, types: tuple[type, ...], processor: str
) -> Callable[..., None]:
    """Return a function of a module, which returns nothing and runs without the GIL; threads compile in turn.

    `types` are those of its arguments in `ctypes`. `processor` is a name of LLVM's, or "" for the one of this machine.
    """
    with _compiling:
        return _compile(str(build_module()), name, types, processor)


def _compile(code: str, name: str, types: tuple[type, ...], processor: str) -> Callable[..., None]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = "" if processor else _list_features()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor or llvm.get_host_cpu_name(), features=features, opt=2, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(name))
    return partial(_call, engine, function)


def _list_features() -> str:
    """Return the features of the processor of this machine; empty if LLVM does not know the processor."""
    try:
        features: str = llvm.get_host_cpu_features().flatten()
    except RuntimeError:
        return ""
    return features


def _call(_engine: object, function: Callable[..., None], *arguments: object) -> None:
    """Call a function, in memory that the engine owns."""
    function(*arguments)


@contextmanager
def open_loop(build: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    """Write a loop, whose body is what the context writes; yield the index, from 0 to below the count."""
    before, zero = build.block, ir.Constant(COUNT, 0)
    head, body, end = (build.append_basic_block(name) for name in ("head", "body", "end"))
    build.branch(head)
    build.position_at_end(head)
    index = build.phi(COUNT)
    index.add_incoming(zero, before)
    build.cbranch(build.icmp_signed("<", index, count), body, end)
    build.position_at_end(body)
    yield index
    index.add_incoming(build.add(index, ir.Constant(COUNT, 1)), build.block)
    build.branch(head)
    build.position_at_end(end)
