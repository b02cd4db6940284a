"""`vllm-gumbel rollout`: reads and sets a server's rollout, judges it, or walks it through its stages."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from vllm_gumbel.arguments import count
from vllm_gumbel.metrics import catalogue
from vllm_gumbel.metrics.catalogue import GUMBEL, SHADOW
from vllm_gumbel.metrics.scrape import ScrapeError
from vllm_gumbel.rollout.client import KEY_VARIABLE, Control, ControlError, State
from vllm_gumbel.rollout.gates import IGNORABLE, judge, together
from vllm_gumbel.rollout.history import HistoryError, Prometheus, Window
from vllm_gumbel.rollout.journal import Keeper
from vllm_gumbel.rollout.report import as_json, table, write
from vllm_gumbel.rollout.results import Limits, Outcome, Question
from vllm_gumbel.rollout.runner import FAILED, NO_TALK, PASSED, UNKNOWN, Plan, Runner
from vllm_gumbel.rollout.stages import StageError, parse_duration, parse_fraction, parse_stages, spoken
from vllm_gumbel.rollout.web import base_address

#: Exit codes of what the gates say.
CODES = {Outcome.PASS: PASSED, Outcome.FAIL: FAILED, Outcome.UNKNOWN: UNKNOWN}
STAGES = "0:shadow,1,5,25,50,100"
#: Columns of a table where no terminal says how many there are.
WIDTH = 160

DESCRIPTION = (
    "Exit code: 0 done, or every gate passed; 1 a gate failed; 2 wrong usage, or server, key or Prometheus do not do; "
    "3 unknown, such as too little traffic."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in (
        ("status", "print fraction, shadow and breaker of a server"),
        ("set", "give the gumbel arm a share of the requests"),
        ("shadow", "draw a share of the default arm's requests in shadow"),
        ("off", "set fraction and shadow to 0"),
        ("close", "close the breaker"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        if name in ("set", "shadow"):
            action.add_argument("fraction", type=_checked(parse_fraction), help="such as 0.05 or 5%%")
        action.add_argument("server", type=_checked(base_address), help="address of the server")
        _add_key(action)
        action.set_defaults(act=partial(_control, name))
    summary = "walk a server through stages, and set it back when a gate fails"
    run = actions.add_parser("run", help=summary, description=f"{summary}. {DESCRIPTION}")
    _add_run(run)
    summary = "judge once what was counted in the last window"
    once = actions.add_parser("judge", help=summary, description=f"{summary}. {DESCRIPTION}")
    once.add_argument("--window", type=_checked(parse_duration), default=600.0, help="such as 10m; default 10m")
    _add_gates(once)
    once.set_defaults(act=_judge)


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand, and return the exit code."""
    try:
        act: Callable[[argparse.Namespace], int] = arguments.act
        return act(arguments)
    except (ControlError, HistoryError) as error:
        print(f"vllm-gumbel rollout: {error}", file=sys.stderr)
        return NO_TALK


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key-file", type=Path, help=f"file with the server's {KEY_VARIABLE}; default: that variable")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--server", type=_checked(base_address), required=True, help="address of the server")
    _add_key(parser)
    parser.add_argument(
        "--stages",
        type=lambda text: (text, _checked(parse_stages)(text)),
        default=STAGES,
        help=f"rising percentages; with `:shadow` the other requests are drawn in shadow. Default {STAGES}",
    )
    parser.add_argument("--hold", type=_checked(parse_duration), default=600.0, help="of a stage; default 10m")
    parser.add_argument("--state", type=Path, help="file that keeps how far it is, so that a second start continues")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and what the gates say; change nothing")
    parser.add_argument("--give-up", type=count, default=6, help="unknown looks of a stage that end it; default 6")
    parser.add_argument("--on-unknown", choices=["hold", "back"], default="hold", help="what is done then")
    _add_gates(parser)
    parser.set_defaults(act=_run)


def _add_gates(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.add_argument("--prometheus", type=_checked(base_address), required=True, help="address of a Prometheus")
    parser.add_argument("--selector", default="", help="matchers that choose the server's series: 'namespace=\"llm\"'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file that gets the evidence")
    parser.add_argument("--alpha", type=_share, default=0.001, help="chance of a false alarm, in all; default 0.001")
    ratios = {
        "ratio": "tolerated rate of anomalies and errors, as a multiple of the reference's",
        "first_token": "tolerated time to the first token, as a multiple of the baseline's",
        "next_token": "tolerated time per token, as a multiple of the baseline's",
        "sampler": "tolerated time in the sampler, as a multiple of the baseline's",
    }
    for name, text in ratios.items():
        default = getattr(limits, name)
        help_text = f"{text}; default {default:g}"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=_ratio, default=default, metavar="TIMES", help=help_text
        )
    for name, text in (("least_rise", "tokens that may be anomalous"), ("least_error_rise", "requests that may fail")):
        default = getattr(limits, name)
        help_text = f"share of more {text} unseen for a gate to pass; default {default:g}"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=_share, default=default, metavar="SHARE", help=help_text
        )
    parser.add_argument("--kl", type=_ratio, metavar="NATS", help="limit of the token frequencies' KL; default none")
    help_text = f"a gate that is only shown; may be repeated; one of {', '.join(IGNORABLE)}"
    parser.add_argument("--ignore", action="append", default=[], choices=IGNORABLE, metavar="GATE", help=help_text)


def _control(name: str, arguments: argparse.Namespace) -> int:
    """Read or change a server's state, and print what it is then."""
    control = Control(arguments.server, _key(arguments))
    states: dict[str, Callable[[], State]] = {
        "status": control.state,
        "set": lambda: control.change(fraction=arguments.fraction),
        "shadow": lambda: control.change(shadow=arguments.fraction),
        "off": lambda: control.change(fraction=0.0, shadow=0.0),
        "close": lambda: control.change(close_breaker=True),
    }
    print(states[name]())
    return PASSED


def _run(arguments: argparse.Namespace) -> int:
    text, stages = arguments.stages
    plan = Plan(
        arguments.server,
        stages,
        text,
        arguments.hold,
        alpha=arguments.alpha,
        limits=_limits(arguments),
        give_up=arguments.give_up,
        back_when_unknown=arguments.on_unknown == "back",
        report=arguments.json,
    )
    control, history = Control(plan.server, _key(arguments)), Prometheus(arguments.prometheus, arguments.selector)
    runner = Runner(plan, control, history, Keeper(arguments.state), _console(), Console(stderr=True))
    return runner.dry_run() if arguments.dry_run else runner.run()


def _judge(arguments: argparse.Namespace) -> int:
    """Judge the arms that have something to do, gumbel if none has."""
    history = Prometheus(arguments.prometheus, arguments.selector)
    now = history.time()
    window = history.window(now - arguments.window, now)
    results = judge(Question(window, _arms(window), arguments.alpha, _limits(arguments)))
    outcome = together(results)
    _console().print(table(f"The last {spoken(arguments.window)}: {outcome}", results))
    if arguments.json is not None:
        try:
            write(arguments.json, {"prometheus": history.url, "outcome": str(outcome), "results": as_json(results)})
        except OSError as error:
            print(f"vllm-gumbel rollout: {arguments.json} cannot be written: {error.strerror}", file=sys.stderr)
            return NO_TALK
    return CODES[outcome]


def _arms(window: Window) -> tuple[str, ...]:
    """Return the arms that drew, or were asked to."""
    asked_or_drawn = {
        GUMBEL: [
            *window.shown.series(catalogue.ROLLOUT_FRACTION),
            *window.counted.series(catalogue.REQUESTS, arm=GUMBEL),
        ],
        SHADOW: [*window.shown.series(catalogue.ROLLOUT_SHADOW), *window.counted.series(catalogue.SHADOW_TOKENS)],
    }
    return tuple(arm for arm, series in asked_or_drawn.items() if any(value for _, value in series)) or (GUMBEL,)


def _limits(arguments: argparse.Namespace) -> Limits:
    return Limits(
        ratio=arguments.ratio,
        least_rise=arguments.least_rise,
        least_error_rise=arguments.least_error_rise,
        first_token=arguments.first_token,
        next_token=arguments.next_token,
        sampler=arguments.sampler,
        kl=arguments.kl,
        ignored=frozenset(arguments.ignore),
    )


def _key(arguments: argparse.Namespace) -> str:
    """Return the administrator's key, which is no argument, since those show in lists of processes.

    Raises:
        ControlError: there is none.
    """
    if arguments.key_file is None:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise ControlError(f"no key: set {KEY_VARIABLE}, or name a file that holds it with --key-file")
        return key
    try:
        return str(arguments.key_file.read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ControlError(f"the key file {arguments.key_file} cannot be read: {reason}") from None


def _console() -> Console:
    """Return where tables go: as wide as the terminal, or wide enough for them."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return a type for argparse that keeps the message of a refusal."""

    def checked(text: str) -> object:
        try:
            return parse(text)
        except (StageError, ScrapeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _share(text: str) -> float:
    """Return a share above 0 and below 1, such as 0.01 or 1%."""
    try:
        share = parse_fraction(text)
    except StageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text}")
    return share


def _ratio(text: str) -> float:
    """Return a number above 0."""
    if not 0 < (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0 and below a million, got {text}")
    return value
