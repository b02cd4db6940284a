"""`vllm-gumbel replay`: what a recorded text would have been under other parameters, with the same luck."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_gumbel.arguments import count, json_or_word
from vllm_gumbel.evaluate import verify_command
from vllm_gumbel.evaluate.records import Record, RecordError, read

DONE, DIFFERS, USAGE = 0, 1, 2

DESCRIPTION = (
    "Write a recorded text again with the same noise and other parameters. The record's own parameters are checked "
    "first: only if they give the recorded tokens does what changes come from the parameters and not from another "
    "model. Exit code: 0 done, 1 the record's own parameters do not give its text, 2 wrong usage."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record, what is changed, and the model."""
    parser.description = DESCRIPTION
    parser.add_argument("records", type=Path, help="file of records, one JSON object a line")
    parser.add_argument("--id", help="which record; may be left out if there is one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", type=_setting, help="a parameter; may be repeated"
    )
    parser.add_argument("--tokens", type=count, help="longest text; default: the request's max_tokens, or its length")
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave the record's own check out")
    verify_command.add_model(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print, and return the exit code."""
    from vllm_gumbel.evaluate.likelihood_text import UnreadableError
    from vllm_gumbel.evaluate.logits import ModelError

    try:
        record = _chosen(list(read(arguments.records)), arguments.id)
        return _replay(record, verify_command.load(arguments), dict(arguments.set), arguments)
    except (RecordError, ModelError, UnreadableError) as error:
        print(f"vllm-gumbel replay: {error}", file=sys.stderr)
        return USAGE


def _replay(record: Record, network: Any, settings: dict[str, Any], arguments: argparse.Namespace) -> int:
    from vllm_gumbel.evaluate.likelihood_text import readable
    from vllm_gumbel.evaluate.replayed_text import first_difference, written

    own = readable(record, network)
    changed = readable(record.model_copy(update={"params": {**record.params, **settings}}), network)
    most = arguments.tokens or changed.record.params.get("max_tokens") or len(own.tokens.output)
    for note in own.notes:
        print(note)
    faithful = not arguments.check or _check(own, network)
    tokens = list(written(changed, network, most))
    recorded = own.tokens.output
    print(f"\nrecorded, {len(recorded)} tokens:\n{_text(network, recorded)}")
    said = ", ".join(f"{name} {value}" for name, value in settings.items()) or "nothing changed"
    print(f"\nwith {said}, {len(tokens)} tokens:\n{_text(network, tokens)}\n")
    print(_parting(network, recorded, tokens, first_difference(recorded, tokens)))
    return DONE if faithful else DIFFERS


def _check(own: Any, network: Any) -> bool:
    """Print whether the record's own parameters give its tokens; return whether a counterfactual can rest on them."""
    from vllm_gumbel.evaluate.likelihood import DIFFERS as OTHERS
    from vllm_gumbel.evaluate.likelihood_text import verified

    _, tolerance = verify_command.tolerance_of(network)
    one = verified(own.record, network, tolerance, 1e-3)
    strays = [place for place, look in enumerate(one.looks) if not look.match]
    if not strays:
        print(f"the record's own parameters give all of its {len(one.looks)} tokens")
        return True
    found = f"the record's own parameters give {one.matched} of its {len(one.looks)} tokens"
    if one.verdict == OTHERS:
        print(f"{found}, and more than precision is behind it: {one.explanation}")
        print("so this is not the model, seed or parameters that wrote it, and what follows is no counterfactual")
        return False
    print(
        f"{found}; the first other one, by precision, is number {strays[0]}: from there on texts may part by it alone"
    )
    return True


def _parting(network: Any, recorded: Sequence[int], tokens: Sequence[int], at: int | None) -> str:
    if at is None:
        return "the two are equal"
    kept = f"the first {at} tokens are equal" if at else "no token is equal"
    before, after = (_text(network, ids[at : at + 1]) for ids in (recorded, tokens))
    return f"{kept}; then {before!r} becomes {after!r}" if before or after else f"{kept}; one ends there"


def _text(network: Any, ids: Sequence[int]) -> str:
    return str(network.tokenizer.decode(list(ids), skip_special_tokens=False))


def _chosen(records: Sequence[Record], name: str | None) -> Record:
    """Return the record of that id, or the only one.

    Raises:
        RecordError: there is none, or there are several and no id was given.
    """
    found = [record for record in records if name in (None, record.id)]
    if not found:
        raise RecordError(f"there is no record {name!r}" if records else "the file holds no record")
    if len(found) > 1:
        raise RecordError(f"the file holds {len(found)} records: choose one with --id, such as {found[0].id!r}")
    return found[0]


def _setting(text: str) -> tuple[str, Any]:
    """Return name and value of a parameter; the value is JSON's, or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text}")
    return name.replace("-", "_"), json_or_word(value)
