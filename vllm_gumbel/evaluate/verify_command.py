"""`vllm-gumbel verify`: says whether recorded texts were drawn as they claim."""

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_gumbel.arguments import chance
from vllm_gumbel.evaluate import likelihood
from vllm_gumbel.evaluate.records import Record, RecordError, read, write_json
from vllm_gumbel.evaluate.verify_command_table import as_json, lines, summary

MATCHES, DIFFERS, USAGE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130

#: Columns of a table where no terminal says how many there are.
WIDTH = 140

DESCRIPTION = (
    "Recompute the logits of recorded texts, replay the noise, and say of each whether its tokens are those of its "
    "model, seed and parameters. Exit code: 0 all match, 1 one differs, 2 wrong usage or a record that cannot be "
    "verified, 3 undecided: too few tokens. Nothing leaves this machine."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is verified, with what, and what is shown."""
    parser.description = DESCRIPTION
    parser.add_argument("records", nargs="+", type=Path, help="files of records, one JSON object a line")
    add_model(parser)
    parser.add_argument(
        "--server-precision",
        choices=list(likelihood.TOLERANCES),
        help="in which the server computed; default: that of the weights",
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        help="size of the difference between the logits of server and verifier; default by the coarser precision: "
        + ", ".join(f"{name} {value:g}" for name, value in likelihood.TOLERANCES.items()),
    )
    parser.add_argument(
        "--alpha", type=chance, default=1e-3, help="chance of a false alarm, for each text; default 0.001"
    )
    parser.add_argument("--fp64-gumbel", action="store_true", help="for `noise: stock`: server with use_fp64_gumbel")
    parser.add_argument("--per-token", action="store_true", help="print every token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file that gets everything, with mode 600")
    parser.add_argument("--redact", action="store_true", help="neither texts nor tokens, on the screen and in the file")
    parser.add_argument(
        "--calibrate", action="store_true", help="find the tolerance of records that are known to be honest; no verdict"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model and how it computes."""
    parser.add_argument("--model", help="folder of the model; default: the one that `vllm-gumbel model` prepares")
    parser.add_argument(
        "--precision", choices=list(likelihood.TOLERANCES), default="float32", help="to compute in; default float32"
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify, print, write, and return the exit code."""
    from vllm_gumbel.evaluate.logits import ModelError

    records: list[Record] = []
    trouble = ""
    try:
        for record in _records(arguments.records):
            records.append(record)
    except RecordError as error:
        trouble = str(error)
    try:
        if not records:
            raise RecordError(trouble or "the files hold no record")
        network = load(arguments)
        if arguments.calibrate:
            return _calibrate(records, network)
        return _verify(records, network, arguments, trouble)
    except (RecordError, ModelError) as error:
        print(f"vllm-gumbel verify: {error}", file=sys.stderr)
        return USAGE


def load(arguments: argparse.Namespace) -> Any:
    """Return the model that the command line names.

    Raises:
        ModelError: there is none.
    """
    from vllm_gumbel.default_model import ModelUnavailable, prepare
    from vllm_gumbel.evaluate.logits import ModelError, Network

    try:
        return Network(arguments.model or prepare(), arguments.precision)
    except ModelUnavailable as error:
        raise ModelError(str(error)) from None


def tolerance_of(network: Any, server: str | None = None) -> tuple[str, float]:
    """Return the server's precision, that of the weights if none is given, and what the coarser of both tolerates."""
    server = server or network.own_precision
    server = server if server in likelihood.TOLERANCES else "float32"
    return server, max(likelihood.TOLERANCES[server], likelihood.TOLERANCES[network.precision])


def progress(console: Console) -> Progress:
    """Return a bar on standard error, which goes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _verify(records: Sequence[Record], network: Any, arguments: argparse.Namespace, trouble: str) -> int:
    from vllm_gumbel.evaluate.likelihood_text import verified

    server, coarser = tolerance_of(network, arguments.server_precision)
    tolerance = arguments.tolerance or coarser
    console, found, interrupted = _console(), [], False
    try:
        with progress(Console(stderr=True)) as bar:
            task = bar.add_task("verifying", total=len(records))
            for record in records:
                one = verified(record, network, tolerance, arguments.alpha, wide=arguments.fp64_gumbel)
                found.append(one)
                console.print(lines(one, network.tokenizer, per_token=arguments.per_token, redact=arguments.redact))
                bar.advance(task)
    except KeyboardInterrupt:
        interrupted = True
    together = likelihood.of_many([one.judgement for one in found if one.judgement is not None], arguments.alpha)
    console.print(summary(found, together, arguments.alpha, tolerance))
    if arguments.json is not None:
        about = {
            "kind": "verification",
            "version": 1,
            "created": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "model": network.folder.name,
            "precision": network.precision,
            "server_precision": server,
            "tolerance": tolerance,
            "alpha": arguments.alpha,
            "redacted": arguments.redact,
        }
        content = as_json(found, together, arguments.alpha, network.tokenizer, redact=arguments.redact)
        write_json(arguments.json, {**about, **content})
    if trouble:
        print(f"vllm-gumbel verify: {trouble}; what stands before it was verified", file=sys.stderr)
    return INTERRUPTED if interrupted else _code([one.verdict for one in found], bool(trouble))


def _code(verdicts: Sequence[str], trouble: bool) -> int:
    if likelihood.DIFFERS in verdicts:
        return DIFFERS
    if trouble or likelihood.UNREADABLE in verdicts:
        return USAGE
    return UNDECIDED if likelihood.UNDECIDED in verdicts else MATCHES


def _calibrate(records: Sequence[Record], network: Any) -> int:
    """Print how well each tolerance explains the records."""
    from vllm_gumbel.evaluate.likelihood_text import fit

    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("calibrating", total=len(records))
        fitted = fit(records, network, lambda: bar.advance(task))
    best = max(fitted, key=lambda each: fitted[each])
    for tolerance, nats in fitted.items():
        mark = "  <- the best" if tolerance == best else ""
        print(f"tolerance {tolerance:10.3g}   log-likelihood {nats:14.2f} nats{mark}")
    print(f"use --tolerance {best:.3g}")
    return MATCHES


def _records(paths: Sequence[Path]) -> Iterator[Record]:
    """Yield the records of all files; where there are several, ids begin with the file's name."""
    for path in paths:
        for record in read(path):
            yield record if len(paths) == 1 else record.model_copy(update={"id": f"{path.stem}: {record.id}"})


def _console() -> Console:
    """Return where results go: as wide as the terminal, or wide enough for them."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, markup=False, highlight=False)


def _tolerance(text: str) -> float:
    """Return a number above 0 and at most 10."""
    if not 1e-6 <= (value := float(text)) <= 10:
        raise argparse.ArgumentTypeError(f"must be a number from 1e-6 to 10, got {text}")
    return value
