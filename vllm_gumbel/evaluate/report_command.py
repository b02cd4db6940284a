"""`vllm-gumbel report`: one page about a comparison, a verification, a rollout, a study or a live server."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from vllm_gumbel.evaluate.page import Page, PageError, render
from vllm_gumbel.evaluate.records import RecordError, write_whole
from vllm_gumbel.evaluate.report_shapes import Comparison, Rollout, Shape, Study, Verification
from vllm_gumbel.evaluate.report_source import SourceError, load
from vllm_gumbel.evaluate.words import clean
from vllm_gumbel.metrics.scrape import Scrape

#: Exit codes.
DONE, CANNOT = 0, 2

DESCRIPTION = (
    "Write one HTML page that opens from disk and asks nothing of any network. What it is about is found out by what "
    "is there. Exit code: 0 written, 2 wrong usage, or nothing that a page can be made of."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is shown, and where the page goes."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "source",
        help="folder of `vllm-gumbel compare` or of scripts/study_knobs.py, JSON of `vllm-gumbel verify` or of "
        "`vllm-gumbel rollout run`, or the address (http://...) of a server, whose counts since its start are shown",
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="file to write; default report.html")
    parser.add_argument("--title", help="of the page; default: what it is about")
    parser.add_argument("--redact", action="store_true", help="leave out texts and tokens; figures stay")


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and return the exit code."""
    try:
        content = load(arguments.source)
        if arguments.redact and isinstance(content, Comparison | Verification):
            content = content.redacted()
        page = page_of(content)
        if arguments.title is not None:
            page = replace(page, title=clean(arguments.title))
        write_whole(arguments.out, render(page))
    except (SourceError, PageError, RecordError) as error:
        print(f"vllm-gumbel report: {error}", file=sys.stderr)
        return CANNOT
    print(arguments.out)
    return DONE


def page_of(content: Shape | Scrape) -> Page:
    """Return the page of whatever was loaded."""
    from vllm_gumbel.evaluate import report_comparison, report_rollout, report_server, report_study, report_verification

    if isinstance(content, Comparison):
        return report_comparison.page(content)
    if isinstance(content, Verification):
        return report_verification.page(content)
    if isinstance(content, Rollout):
        return report_rollout.page(content)
    if isinstance(content, Study):
        return report_study.page(content)
    if isinstance(content, Scrape):
        return report_server.page(content)
    raise TypeError(f"no page for {type(content).__name__}")
