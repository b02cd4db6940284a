"""Finds out what a report is to be about: a folder, a file or the address of a server, recognised by what it holds."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_gumbel.evaluate.records import first_error
from vllm_gumbel.evaluate.report_shapes import Comparison, Rollout, Shape, Study, Verification
from vllm_gumbel.evaluate.words import clean
from vllm_gumbel.metrics.scrape import Scrape, ScrapeError, fetch
from vllm_gumbel.text import shorten

#: Bytes of a file that are read at most.
LARGEST_FILE = 512 * 2**20
#: Files of a folder that a report is made from, and what makes them.
IN_FOLDER = {"comparison.json": "vllm-gumbel compare", "knobs.json": "scripts/study_knobs.py"}

EXPECTED = (
    "expected the folder of `vllm-gumbel compare` or of scripts/study_knobs.py, the JSON of `vllm-gumbel verify` or of "
    "`vllm-gumbel rollout run`, or the address of a server"
)


class SourceError(Exception):
    """Nothing a report could be made of; the message names it and says what was expected."""


def load(source: str, timeout: float = 10.0) -> Shape | Scrape:
    """Return what a report is to be about.

    Args:
        source: path of a folder or file, or address of a server or of its metrics page.
        timeout: seconds that a server may take to answer.

    Raises:
        SourceError: it is none of these, cannot be read, or is broken.
    """
    if "://" in source:
        try:
            return fetch(source, timeout)
        except ScrapeError as error:
            raise SourceError(str(error)) from None
    path = Path(source)
    try:
        there, folder = path.exists(), path.is_dir()
    except (OSError, ValueError):
        there = folder = False
    if not there:
        raise SourceError(f"{shorten(source)} is neither a file nor a folder, nor an address with http://; {EXPECTED}")
    return _of_file(_in(path) if folder else path)


def _in(folder: Path) -> Path:
    """Return the file of a folder that holds its results."""
    found = [folder / name for name in IN_FOLDER if (folder / name).exists()]
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(f"{folder} holds {' and '.join(IN_FOLDER)}: name one of them")
    if (folder / "baseline.jsonl").exists():
        raise SourceError(
            f"{folder} holds texts, but no comparison.json: `vllm-gumbel compare` has not ended there; the same "
            "command again does what is missing"
        )
    wanted = " or ".join(f"{name} (of {maker})" for name, maker in IN_FOLDER.items())
    raise SourceError(f"{folder} holds neither {wanted.replace(' or ', ' nor ')}; {EXPECTED}")


def _of_file(path: Path) -> Shape:
    """Return what a file of JSON holds."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise SourceError(f"{path} is larger than {LARGEST_FILE // 2**20} MiB")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise SourceError(f"{path} is no JSON ({error.msg} at {where}); {EXPECTED}") from None
    except (ValueError, RecursionError):
        raise SourceError(f"{path} is no JSON; {EXPECTED}") from None
    shape = _shape(content)
    if shape is None:
        raise SourceError(f"{path} is JSON of something else; {EXPECTED}")
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        field, rule = first_error(error)
        raise SourceError(f"{path}, field {clean(field or 'the whole')}: {rule}") from None


def _shape(content: Any) -> type[Shape] | None:
    """Return the shape that content means to have; None if none is known."""
    if not isinstance(content, dict):
        return None
    if isinstance(kind := content.get("kind"), str):
        kinds: dict[str, type[Shape]] = {"comparison": Comparison, "verification": Verification}
        return kinds.get(kind)
    if "looks" in content and "stages" in content:
        return Rollout
    return Study if "settings" in content and "batch_tokens" in content else None
