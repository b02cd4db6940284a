"""`vllm-gumbel compare`: asks two deployments the same with the same luck, and says what differs."""

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gumbel.arguments import json_or_word
from vllm_gumbel.evaluate.prompts import TASKS, Prompt, PromptError, built_in, digest, read
from vllm_gumbel.evaluate.records import RecordError
from vllm_gumbel.metrics.scrape import ScrapeError
from vllm_gumbel.rollout.web import base_address

if TYPE_CHECKING:
    from vllm_gumbel.evaluate.comparison_question import Question

#: Exit code of wrong usage, and where a side does not answer or texts are missing.
NO_TALK = 2

DESCRIPTION = (
    "Send the same prompts with the same seeds to two deployments, and say what differs, with paired statistics. Where "
    "both draw with this package's sampler, equal seeds mean equal noise, which takes most of the chance out of the "
    "difference. What has come is kept in DIR: the same command again asks only what is missing. Nothing is sent to "
    "anybody but the two. Exit code: 0 done; 2 wrong usage, a side does not answer, or texts are missing; 130 "
    "interrupted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add who is compared, what is asked, and where the answers go."""
    parser.description = DESCRIPTION
    for role in ("baseline", "candidate"):
        parser.add_argument(
            f"--{role}", required=True, metavar="URL|MODEL", help="address of a server, or folder of a model to serve"
        )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the answers and the result")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--prompts", type=Path, metavar="FILE", help="lines of JSON with `prompt` or `messages`")
    asked.add_argument("--task", action="append", choices=TASKS, help="a built-in set; may be repeated; default all")
    asked.add_argument("--limit", type=_count, metavar="N", help="prompts of each task at most; default all")
    asked.add_argument("--seeds", type=_count, default=4, help="texts of a prompt and a side; default 4")
    asked.add_argument("--first-seed", type=_seed, default=0, help="of them, the others follow; default 0")
    asked.add_argument("--tokens", type=_count, default=256, help="of a text at most; default 256")
    asked.add_argument("--chat", action="store_true", help="send texts as chats of one message")
    asked.add_argument("--temperature", type=float, default=1.0, help="default 1")
    asked.add_argument("--top-p", type=float, default=1.0, help="default 1")
    for name, whose in (("set", "both sides"), ("baseline-set", "the baseline"), ("candidate-set", "the candidate")):
        asked.add_argument(
            f"--{name}",
            action="append",
            default=[],
            type=_setting,
            metavar="KEY=VALUE",
            help=f"a sampling parameter of {whose}, such as top_k=50 or gumbel_noise_scale=0.8; may be repeated",
        )
    how = parser.add_argument_group("how it is asked")
    for role in ("baseline", "candidate"):
        how.add_argument(f"--{role}-name", default="", metavar="NAME", help="of the model, where a server has several")
        how.add_argument(
            f"--{role}-serve",
            type=shlex.split,
            default=[],
            metavar="FLAGS",
            help="of `vllm serve`, for a folder, in one argument such as '--dtype float32 --max-model-len 2048'",
        )
    how.add_argument("--concurrency", type=_count, default=16, help="requests at a time to each side; default 16")
    how.add_argument("--timeout", type=_seconds, default=300.0, help="seconds without a byte; default 300")
    how.add_argument("--tries", type=_count, default=8, help="attempts of a request; default 8, over about a minute")
    how.add_argument("--retry-failed", action="store_true", help="ask again what a server had refused")
    parser.add_argument(
        "--redact", action="store_true", help="keep statistics only: no text and no token in DIR at the end"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, and return the exit code."""
    try:
        from vllm_gumbel.evaluate.client import ClientError
        from vllm_gumbel.evaluate.client_server import ServerError
        from vllm_gumbel.evaluate.coherence import CoherenceUnavailable
        from vllm_gumbel.evaluate.comparison_making import make
        from vllm_gumbel.evaluate.comparison_question import QuestionError, held
        from vllm_gumbel.evaluate.measures import MeasureError
    except ImportError as error:
        return _complain(f"it needs {error.name}; get it with: pip install 'vllm-gumbel[evaluate]'")
    try:
        prompts = _prompts(arguments)
        question = _question(arguments, prompts)
        with _terminable(), held(arguments.out, question):
            make(arguments, question, prompts)
    except (
        ClientError,
        CoherenceUnavailable,
        MeasureError,
        PromptError,
        QuestionError,
        RecordError,
        ServerError,
    ) as error:
        return _complain(str(error))
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, so that what was started is ended."""

    def interrupt(*_: object) -> None:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # whoever handles that one now knows how to end

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """Return what is asked.

    Raises:
        PromptError: the file cannot be used.
    """
    if arguments.prompts is not None and arguments.task:
        raise PromptError("--task chooses among the built-in prompts, so it cannot be used with --prompts")
    found = built_in(arguments.task or TASKS) if arguments.prompts is None else read(arguments.prompts)
    if arguments.limit is None:
        return found
    tasks = dict.fromkeys(prompt.task for prompt in found)
    return [prompt for task in tasks for prompt in [each for each in found if each.task == task][: arguments.limit]]


def _question(arguments: argparse.Namespace, prompts: list[Prompt]) -> "Question":
    """Return the question that the arguments ask.

    Raises:
        QuestionError: a side is neither address nor folder; a parameter has an option of its own.
    """
    from vllm_gumbel.evaluate.comparison_question import OWN_PARAMETERS, Question, QuestionError

    settings = {name: dict(getattr(arguments, name)) for name in ("set", "baseline_set", "candidate_set")}
    for name, given in settings.items():
        for key in given:
            if key in OWN_PARAMETERS:
                raise QuestionError(f"--{name.replace('_', '-')}: {key} is set by compare itself, or by its own option")
    return Question(
        baseline=_side(arguments.baseline, "baseline"),
        candidate=_side(arguments.candidate, "candidate"),
        baseline_name=arguments.baseline_name,
        candidate_name=arguments.candidate_name,
        tasks=[] if arguments.prompts else list(arguments.task or TASKS),
        prompts=digest(prompts),
        seeds=arguments.seeds,
        first_seed=arguments.first_seed,
        max_tokens=arguments.tokens,
        chat=arguments.chat,
        settings={"temperature": arguments.temperature, "top_p": arguments.top_p, **settings["set"]},
        baseline_settings=settings["baseline_set"],
        candidate_settings=settings["candidate_set"],
        baseline_serve=arguments.baseline_serve,
        candidate_serve=arguments.candidate_serve,
    )


def _side(text: str, role: str) -> str:
    """Return a side's folder, whole, or its server's address without `/v1`."""
    from vllm_gumbel.evaluate.comparison_question import QuestionError

    if Path(text).is_dir():
        return str(Path(text).resolve())
    try:
        if "://" not in text and ("/" in text or ":" not in text):
            raise ScrapeError(f"{text!r} is neither a folder nor an address like http://127.0.0.1:8000")
        return base_address(text).removesuffix("/v1")
    except ScrapeError as error:
        raise QuestionError(f"--{role}: {error}") from None


def _complain(message: str) -> int:
    print(f"vllm-gumbel compare: {message}", file=sys.stderr)
    return NO_TALK


def _setting(text: str) -> tuple[str, Any]:
    """Return a sampling parameter: its name, and its value in JSON or as a word."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text}")
    return key, json_or_word(value)


def _within(least: float, most: float, kind: type, text: str) -> Any:
    """Return a number within bounds."""
    if not least <= (value := kind(text)) <= most:
        raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}, got {text}")
    return value


_count = partial(_within, 1, 1_000_000, int)
_seed = partial(_within, 0, 2**62, int)
_seconds = partial(_within, 0.01, 86_400, float)
