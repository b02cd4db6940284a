"""What several commands read from the command line; each raises argparse's error for a text that it does not take."""

import argparse
import json
from typing import Any


def chance(text: str) -> float:
    """Return a number between 0 and 1, excluded."""
    if not 1e-100 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a chance above 0 (1e-100 at least) and below 1, got {text}")
    return value


def count(text: str) -> int:
    """Return a whole number, at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def json_or_word(text: str) -> Any:
    """Return what a value is in JSON; a word stays a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
