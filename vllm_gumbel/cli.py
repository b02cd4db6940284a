"""The console command `vllm-gumbel`: one table of subcommands, each a function that returns the exit code.

Results go to standard output, everything else to standard error, so that a shell can use what is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_gumbel.arguments import chance, json_or_word


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


def run_params(arguments: argparse.Namespace) -> int:
    """Prints every key that a request can set, and every combination that is refused."""
    from vllm_gumbel.params import CONTRADICTIONS, GumbelParams

    for key, values, default, effect, cost in GumbelParams.table():
        print(f"{key}\n    {values}; default {default}\n    {effect}\n    cost: {cost}".replace("`", ""))
    print("\nRefused together:")
    for rule in CONTRADICTIONS:
        print(f"    {rule.key} and {rule.other}: {rule.reason}")
    return 0


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's own settings, every key that a request can set, and what they are explained with."""
    from vllm_gumbel.explain import SWEEPS
    from vllm_gumbel.params import GumbelParams

    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    for key, values, default, _, _ in GumbelParams.table():
        text = f"{values}; default {default}".replace("`", "").replace("%", "%%")
        parser.add_argument(f"--{key.replace('_', '-')}", metavar="VALUE", help=text)
    parser.add_argument("--over", choices=list(SWEEPS), default="temperature", help="what the plot goes through")
    parser.add_argument("--model", help="folder of a model; default: the one that `vllm-gumbel model` prepares")
    parser.add_argument("--prompt", action="append", help="a text after which the model is asked; may be repeated")


def run_explain(arguments: argparse.Namespace) -> int:
    """Prints what a combination of settings does to a model's distribution."""
    from vllm_gumbel import explain
    from vllm_gumbel.default_model import ModelUnavailable, prepare
    from vllm_gumbel.params import GumbelParams, ParamsError

    given = {
        key: json_or_word(text) for key in GumbelParams.model_fields if (text := getattr(arguments, key)) is not None
    }
    try:
        keys = GumbelParams.from_extra_args(given, arguments.temperature)
        setting = explain.Setting(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p, keys)
        setting.at(arguments.over, explain.SWEEPS[arguments.over][-1])
        with contextlib.redirect_stdout(sys.stderr):
            model = arguments.model or str(prepare())
            logits = explain.model_logits(model, arguments.prompt or explain.PROMPTS)
    except (ParamsError, ModelUnavailable) as error:
        print(f"vllm-gumbel explain: {error}", file=sys.stderr)
        return 1
    print("\n".join(explain.sentences(setting, logits.shape[1])))
    plain, changed = (explain.effect(logits, each) for each in (explain.Setting(), setting))
    print(f"\nMean over {len(logits)} texts{'':<18} the model's own     with this setting")
    for name in ("entropy_nats", "kept_ids", "kept_mass", "kl_nats", "best"):
        print(f"{name:<38} {getattr(plain, name):>16.6g} {getattr(changed, name):>21.6g}")
    print("\n" + "\n".join(explain.plot(logits, setting, arguments.over)))
    return 0


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is read and what is written."""
    from vllm_gumbel.metrics.exporter import PRIVATE_VARIABLE

    parser.add_argument("out", type=Path, help="file to write; --sampler-config's token_profile takes it")
    parser.add_argument(
        "--folder",
        type=Path,
        default=os.environ.get(PRIVATE_VARIABLE),
        help=f"the server's folder of metrics, which {PRIVATE_VARIABLE} sets for both; default: that",
    )
    parser.add_argument("--arm", choices=["gumbel", "default"], default="gumbel", help="whose tokens; default gumbel")


def run_profile(arguments: argparse.Namespace) -> int:
    """Writes how often each token was drawn by a server."""
    from vllm_gumbel.metrics.frequencies import ProfileError, counts_of_folder, write_profile

    try:
        if arguments.folder is None:
            raise ProfileError("--folder must name the server's folder of metrics (see --help)")
        counts = counts_of_folder(Path(arguments.folder), arguments.arm)
        write_profile(arguments.out, counts)
    except ProfileError as error:
        print(f"vllm-gumbel profile: {error}", file=sys.stderr)
        return 1
    print(f"{counts.sum():,} tokens, {(counts > 0).sum():,} ids of {len(counts):,}: {arguments.out}")
    return 0


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is judged, and by which chance of a false alarm."""
    parser.description = (
        "Judge everything counted since the server started; with --seconds only what is counted from now on; with "
        "--watch what is counted from now on, looked at again and again. Exit code: 0 every arm with traffic draws "
        "exactly, 1 one does not, 2 wrong usage, 3 unknown: too few tokens, or no answer."
    )
    parser.add_argument("url", type=_address, help="of the server or of its /metrics; http without a scheme")
    parser.add_argument("--seconds", type=_positive, help="how long to count; with --watch between looks, default 30")
    parser.add_argument("--watch", action="store_true", help="look until an arm is not exact; see --alpha")
    parser.add_argument("--since-start", action="store_true", help="with these, judge everything since the start still")
    parser.add_argument(
        "--alpha",
        type=chance,
        default=1e-6,
        help="chance that an exact server is called not exact, tests, arms and looks together (look k of --watch gets "
        "1 / (k (k + 1)) of it); default 1e-6",
    )
    parser.add_argument("--arm", help="judge this arm only; default: every arm with traffic")
    parser.add_argument("--json", action="store_true", help="print one line of JSON a look")


def run_check(arguments: argparse.Namespace) -> int:
    """Says whether a server draws exactly."""
    from vllm_gumbel import check

    return check.run(
        arguments.url,
        seconds=arguments.seconds,
        watch=arguments.watch,
        since_start=arguments.since_start,
        alpha=arguments.alpha,
        arm=arguments.arm,
        json_lines=arguments.json,
    )


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds where to look, and how often."""
    parser.add_argument("url", type=_address, help="of the server or of its /metrics; http without a scheme")
    parser.add_argument("--interval", type=_positive, default=2.0, help="seconds between two looks; default 2")
    parser.add_argument("--once", action="store_true", help="end after one view, which takes two looks")


def run_top(arguments: argparse.Namespace) -> int:
    """Shows a server until interrupted."""
    from vllm_gumbel import top

    return top.run(arguments.url, interval=arguments.interval, once=arguments.once)


def _address(text: str) -> str:
    """Returns the address of a metrics page; any other text is wrong usage."""
    from vllm_gumbel.metrics.scrape import ScrapeError, page_address

    try:
        return page_address(text)
    except ScrapeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> float:
    """Returns a number of seconds, above 0 and of a week at most."""
    if not 0 < (value := float(text)) <= 604_800:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most a week (604800 s), got {text}")
    return value


def add_glitch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds whose glitch tokens are wanted, and how they are printed."""
    parser.add_argument("model", nargs="?", help="folder of a model; default: that of `vllm-gumbel model`")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--all", action="store_true", help="show every id of each kind, not only the clearest")


def run_glitch(arguments: argparse.Namespace) -> int:
    """Prints which ids of a model are glitch tokens."""
    from vllm_gumbel.glitch_report import run

    return run(arguments)


class Command(NamedTuple):
    """One subcommand: its line in the help, what adds its options, and what runs it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def in_module(summary: str, module: str) -> Command:
    """Returns a subcommand whose options and work stand in a module of their own, loaded when they are needed."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        importlib.import_module(module).add_arguments(parser)

    def run(arguments: argparse.Namespace) -> int:
        return int(importlib.import_module(module).run(arguments))

    return Command(summary, add_arguments, run)


COMMANDS = {
    "model": Command(
        "prepare the default model, SmolLM2-135M-Instruct, where needed, and print its folder",
        add_no_arguments,
        run_model,
    ),
    "explain": Command(
        "print what a combination of a request's settings does to a model's distribution",
        add_explain_arguments,
        run_explain,
    ),
    "params": Command("print what a request can set, and what is refused together", add_no_arguments, run_params),
    "profile": Command(
        "write how often each token was drawn by a server, to compare later ones with",
        add_profile_arguments,
        run_profile,
    ),
    "check": Command(
        "say whether a running server draws exactly, from what it has counted", add_check_arguments, run_check
    ),
    "top": Command("show live what a running server draws, and how exactly", add_top_arguments, run_top),
    "rollout": in_module(
        "read and set which share of the requests a server's gumbel arm gets, by hand or in judged stages",
        "vllm_gumbel.rollout.command",
    ),
    "compare": in_module(
        "ask two deployments the same with the same luck, and say what differs, with paired statistics",
        "vllm_gumbel.evaluate.compare_command",
    ),
    "verify": in_module(
        "say whether recorded texts were drawn by a model with the seed and parameters that they claim",
        "vllm_gumbel.evaluate.verify_command",
    ),
    "replay": in_module(
        "write a recorded text again with the same noise and other parameters", "vllm_gumbel.evaluate.replay_command"
    ),
    "noise": in_module(
        "print the noise of a token, or the known answers of its specification", "vllm_gumbel.evaluate.noise_command"
    ),
    "report": in_module(
        "write one page that shows a comparison, a verification, a rollout, a knob study or a live server",
        "vllm_gumbel.evaluate.report_command",
    ),
    "glitch": Command("print which ids of a model are glitch tokens", add_glitch_arguments, run_glitch),
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
    except BrokenPipeError:  # whoever read has read enough; Python would complain again when it closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
