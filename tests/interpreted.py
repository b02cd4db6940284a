"""Runs Python where Triton's interpreter stands in for a GPU and vLLM uses its model runner V2.

The interpreter is chosen when Triton is imported, so it needs a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str | Path, **environment: str) -> str:
    """Run `python *arguments` in the interpreter and return its output; it must end well."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GUMBEL_")}
    inherited |= {
        "PYTHONPATH": f"{ROOT / 'tests' / 'interpreter'}{os.pathsep}{ROOT}",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **environment,
    }
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=1400)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{output[-6000:]}"
    return output
