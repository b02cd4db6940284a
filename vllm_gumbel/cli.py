"""The console command `vllm-gumbel`: one table of subcommands, each a function that returns the exit code.

Results go to standard output, everything else to standard error, so that a shell can use what is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


def add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: for subcommands without options."""


def run_model(arguments: argparse.Namespace) -> int:
    """Prepares the default model and prints its folder."""
    from vllm_gumbel.default_model import ModelUnavailable, prepare

    try:
        # The libraries behind it may print; only the path belongs on standard output.
        with contextlib.redirect_stdout(sys.stderr):
            path = prepare()
    except ModelUnavailable as error:
        print(f"vllm-gumbel model: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def run_settings(arguments: argparse.Namespace) -> int:
    """Prints every server-wide setting with its environment variable, default and meaning."""
    from vllm_gumbel.settings import SamplerSettings

    for name, variable, default, description in SamplerSettings.table():
        print(f"{name}\n    environment {variable}, default {default}\n    {description}")
    return 0


class Command(NamedTuple):
    """One subcommand: its line in the help, what adds its options, and what runs it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "model": Command(
        "prepare the default model, SmolLM2-135M-Instruct, where needed, and print its folder",
        add_no_arguments,
        run_model,
    ),
    "settings": Command(
        "print what a server can set with --sampler-config, LLM(additional_config=...) or the environment",
        add_no_arguments,
        run_settings,
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command and of every subcommand in the table."""
    parser = argparse.ArgumentParser(
        prog="vllm-gumbel",
        description="Tools around vllm-gumbel, exact and reproducible sampling for vLLM by the Gumbel-Max trick.",
        epilog="The sampler itself is used with: vllm serve MODEL --sampler gumbel",
    )
    version = importlib.metadata.version("vllm-gumbel")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments after the command's name; None for those of the process.

    Returns:
        The exit code: 0, 1 after an error, 130 when interrupted; wrong usage exits with 2.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        return 130
