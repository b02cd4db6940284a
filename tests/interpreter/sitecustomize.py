"""Lets Triton's interpreter stand in for a GPU: put this folder on `PYTHONPATH` and set `TRITON_INTERPRET=1`.

Python imports a `sitecustomize` it finds before anything else, in every process, so also in the engine core and the
workers that vLLM starts. vLLM's CPU build uses Triton only if Triton has a backend named `cpu`, which the wheel lacks.
This registers one that says it is active and does nothing else: kernels then run in the interpreter, which needs none.

Without `TRITON_INTERPRET=1` nothing happens.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import torch
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        """A driver for the CPU that is asked what it drives, never to launch."""

        def __init__(self) -> None:
            self.utils = None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("the interpreter launches nothing")

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_current_device(self) -> int:
            return 0

        def get_benchmarker(self) -> None:
            raise NotImplementedError("the interpreter measures nothing")

    backends.setdefault("cpu", Backend(compiler=BaseBackend, driver=InterpreterDriver))

    from triton.runtime import interpreter

    _patched: set[str] = set()

    def _call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        """Call a device function, patching Triton's language for its module once instead of at every call.

        A launch patches `triton.language` itself; a call only adds what other modules see, and never takes it back. So
        results are the same, in half the time.
        """
        module = self.fn.__module__
        if module not in _patched:
            interpreter._patch_lang(self.fn)
            _patched.add(module)
        return self.rewrite()(*args, **kwargs)

    _restore = interpreter.GridExecutor._restore_args_dev

    def _restore_unless_in_place(self: interpreter.GridExecutor, given: tuple, used: list, *named: dict) -> None:
        """Copy results back to where arguments came from, unless they are there: memory of the CPU is used as it is."""
        tensors = [value for value in (*given, *named[0].values()) if hasattr(value, "data_ptr")]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            _restore(self, given, used, *named)

    _store = interpreter.InterpreterBuilder.create_masked_store

    def _store_where_true(self: interpreter.InterpreterBuilder, to: object, value: object, mask: object, *rest: object):
        """Take a mask for one: where a comparison of scalars is part of it, it has the type of what was compared."""
        return _store(self, to, value, interpreter.TensorHandle(mask.data.astype(bool), mask.dtype), *rest)

    interpreter.InterpreterBuilder.create_masked_store = _store_where_true
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor._restore_args_dev = _restore_unless_in_place
