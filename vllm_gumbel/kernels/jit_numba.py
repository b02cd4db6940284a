"""What the Numba kernels share: how they are compiled and cached, and the few operations Numba has no name for.

Every function here and in the other `*_numba` modules runs without the compiler too (`NUMBA_DISABLE_JIT=1`), slowly and
with the same results: an operation that is an LLVM instruction under the compiler has a Python twin beside it.

Flags: no fast-math anywhere, since its `ninf` breaks masked logits and its `reassoc` the rounding tricks of
`masses_numba`. The one place that may reorder a sum says so with `add_any_order`. `error_model="numpy"` because a check
for division by zero keeps a loop scalar. Indices come from `range` over a slice, which starts at a known 0: an index of
unknown sign brings a wrap-around check that keeps a loop scalar as well.

Cache: `$XDG_CACHE_HOME/vllm-gumbel/numba-<version of Numba>-<digest of the kernels' sources>`. Numba's own key knows
the processor and the file a function stands in, not the other files whose functions it inlines; the digest does. The
folder is set only while our functions are decorated, so nobody else's cache moves.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import config, types
from numba.extending import intrinsic, overload

from vllm_gumbel.cache import default_cache

logger = logging.getLogger("vllm.gumbel")

WITHOUT_JIT = bool(config.DISABLE_JIT)

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I16, I32, I64, F32, F64 = np.int16, np.int32, np.int64, np.float32, np.float64


def cache_folder() -> Path:
    """Return the folder of compiled kernels; it need not exist."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*_numba.py")):
        digest.update(source.read_bytes())
    return default_cache() / f"numba-{numba.__version__}-{digest.hexdigest()[:12]}"


_CACHE = str(cache_folder())


def jit(function: Callable[..., Any] | None = None, *, parallel: bool = False, inline: bool = False) -> Any:
    """Compile a kernel at its first call or by `.compile`; releases the GIL, keeps the result on disk.

    Args:
        function: the kernel.
        parallel: whether `prange` in it runs on Numba's threads.
        inline: whether it is small and only ever part of others; such functions need no cache of their own.
    """
    if function is None:
        return lambda f: jit(f, parallel=parallel, inline=inline)
    kernel = numba.njit(nogil=True, error_model="numpy", parallel=parallel)(function)
    if not inline and not WITHOUT_JIT:
        _keep_on_disk(kernel)
    return kernel


def _keep_on_disk(kernel: Any) -> None:
    """Keep a kernel's machine code on disk, where that can be; Numba raises for a full disk and for a damaged file."""
    saved = config.CACHE_DIR
    config.CACHE_DIR = _CACHE
    try:
        kernel.enable_caching()
    except RuntimeError:  # which names the kernel, so that there would be a line for each
        _warn("no folder for them can be written")
        return
    finally:
        config.CACHE_DIR = saved
    kept = kernel._cache
    load, save = kept.load_overload, kept.save_overload

    def load_or_compile(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # a file cut short fails in many ways
            _warn(repr(error))
            with contextlib.suppress(OSError):
                kept.flush()  # or the damage would be met again at each start
            return None

    def save_or_go_on(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:
            _warn(repr(error))

    kept.load_overload, kept.save_overload = load_or_compile, save_or_go_on


@cache
def _warn(error: str) -> None:
    """Say once why kernels are compiled anew."""
    logger.warning("vllm-gumbel: compiled kernels cannot all be kept on disk, so they are compiled anew: %s", error)


if WITHOUT_JIT:

    def use_widest_vectors() -> None:
        """Ask for the widest vectors the processor has in the function that calls this."""

    def always_inline() -> None:
        """Make the function that calls this part of every caller."""

    def add_any_order(a: Any, b: Any) -> Any:
        """Return a + b; a sum made of these may be reordered."""
        return a + b

    def larger(a: Any, b: Any) -> Any:
        """Return the larger of two floats; anything at all if one of them is a NaN."""
        return a if a > b else b

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once or twice, whichever is faster."""
        return a * b + c

    def take_next(counter: Any) -> Any:
        """Return counter[0] and add one to it, as one step that no other thread can split."""
        counter[0] += 1
        return counter[0] - 1

    def prefetch(array: Any, index: int) -> None:
        """Start loading the cache line of an element; it may lie past the end."""

    def row_of(matrix: Any, row: int) -> Any:
        """Return one row of a matrix of unit column stride as a contiguous array."""
        return matrix[row]

else:

    @intrinsic
    def use_widest_vectors(typing_context: Any) -> Any:
        """Ask for the widest vectors the processor has in the function that calls this.

        LLVM prefers half of what many processors with AVX-512 can do. llvmlite knows no name for this attribute, but
        writes out whatever stands in the set.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
            return context.get_dummy_value()

        return types.none(), generate

    @intrinsic
    def always_inline(typing_context: Any) -> Any:
        """Make the function that calls this part of every caller, where LLVM would rather call it."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.function.attributes.add("alwaysinline")
            return context.get_dummy_value()

        return types.none(), generate

    @intrinsic
    def add_any_order(typing_context: Any, a: Any, b: Any) -> Any:
        """Return a + b; a sum made of these may be reordered, so that it becomes vector code."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.fadd(arguments[0], arguments[1], flags=("reassoc", "nsz"))

        return a(a, a), generate

    @intrinsic
    def larger(typing_context: Any, a: Any, b: Any) -> Any:
        """Return the larger of two floats; anything at all if one of them is a NaN.

        A maximum that has to mind NaN or the sign of zero stays scalar.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = arguments[0].type
            function = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind] * 2))
            return builder.call(function, arguments, fastmath=("nnan", "nsz"))

        return a(a, a), generate

    @intrinsic
    def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once or twice, whichever is faster; all of one float type."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = arguments[0].type
            function = builder.module.declare_intrinsic("llvm.fmuladd", [kind], ir.FunctionType(kind, [kind] * 3))
            return builder.call(function, arguments)

        return a(a, a, a), generate

    @intrinsic
    def take_next(typing_context: Any, counter: Any) -> Any:
        """Return counter[0] and add one to it, as one step that no other thread can split."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.atomic_rmw("add", data, context.get_constant(types.int64, 1), "monotonic")

        return types.int64(counter), generate

    @intrinsic
    def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
        """Start loading the cache line of an element; it may lie past the end."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
            function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
            builder.call(function, [place, word(0), word(3), word(1)])  # to read, into every level, data
            return context.get_dummy_value()

        return types.none(array, types.int64), generate

    @intrinsic
    def _pointer(typing_context: Any, address: Any, like: Any) -> Any:
        """Return `address` as a pointer to elements of the array `like`."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(like.dtype)(address, like), generate

    def row_of(matrix: Any, row: int) -> Any:
        """Return one row of a matrix of unit column stride as an array that is contiguous by its type.

        So that loops over it become vector code. It is no counted reference either: passing it on costs nothing.
        """

    @overload(row_of, strict=False)
    def _row_of(matrix: Any, row: Any) -> Any:
        def implementation(matrix: Any, row: Any) -> Any:
            address = matrix.ctypes.data + I64(row) * I64(matrix.strides[0])
            return numba.carray(_pointer(address, matrix), (matrix.shape[1],))

        return implementation
