#!/usr/bin/env python
"""Write a copy of a model whose weights are rounded, to study what quantised weights do to texts.

    .venv/bin/python scripts/rounded_model.py MODEL 4 OUT

Every projection of every layer is rounded symmetrically in groups of 32 weights that share a scale, the largest of the
group over 2^(bits - 1) - 1, and stored in the model's own dtype, so that whatever loads the model loads the copy.
Embeddings, output head and norms stay, as in most quantised models.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

GROUP = 32


def rounded(model_folder: Path, bits: int, out_folder: Path) -> Path:
    """Write the copy and return its folder.

    Args:
        model_folder: of a model in safetensors.
        bits: of a weight, 2 to 8.
        out_folder: to write; what a run that was cut off left there is replaced.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be an integer from 2 to 8, got {bits}")
    return rewritten(
        model_folder,
        out_folder,
        lambda name, weight: _rounded(weight, bits) if _is_projection(name) else weight,
    )


def rewritten(model_folder: Path, out_folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    """Write a copy of a model in safetensors whose weights are what `change` makes of them, and return its folder.

    Args:
        model_folder: of the model.
        out_folder: to write; what is there is replaced.
        change: called with the name of each weight and itself; None leaves it out.
    """
    from safetensors.torch import load_file, save_file

    out_folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(model_folder.iterdir()):
        if file.suffix != ".safetensors":
            shutil.copy(file, out_folder / file.name)
            continue
        changed = {name: change(name, weight) for name, weight in load_file(file).items()}
        kept = {name: weight for name, weight in changed.items() if weight is not None}
        save_file(kept, out_folder / file.name, metadata={"format": "pt"})
    return out_folder


def _is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def _rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a matrix with its rows rounded in groups; a row's last group may be shorter."""
    rows, columns = weight.shape
    padding = -columns % GROUP
    groups = torch.nn.functional.pad(weight.float(), (0, padding)).reshape(rows, -1, GROUP)
    scale = groups.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    levels = (groups / scale.clamp(min=1e-30)).round()
    return (levels * scale).reshape(rows, -1)[:, :columns].to(weight.dtype).contiguous()


def main() -> None:
    """Write the copy that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("bits", type=int, choices=range(2, 9))
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(rounded(arguments.model, arguments.bits, arguments.out))


if __name__ == "__main__":
    main()
