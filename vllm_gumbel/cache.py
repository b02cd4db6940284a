"""Where this package keeps what it has made once: prepared models, compiled kernels, lists of glitch tokens."""

import os
from pathlib import Path


def default_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/vllm-gumbel`, else the same under `~/.cache`; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-gumbel"
