"""Asks an endpoint that answers in JSON: the control endpoint of a server, and the API of Prometheus."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from vllm_gumbel.metrics.scrape import LARGEST_PAGE, page_address, reason_of


class WebError(Exception):
    """An address does not answer; the message names it and the reason."""


class TalkError(Exception):
    """Somebody who was asked does not say; the message names the address and the reason.

    Attributes:
        passing: whether asking again may help.
    """

    def __init__(self, message: str, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        status: of HTTP.
        reason: its words.
        content: the JSON; None if it was none.
    """

    status: int
    reason: str
    content: Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would carry a key to wherever the answer says."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect is an answer like any other."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def base_address(text: str) -> str:
    """Return the address of a server without a slash at its end, given that or the one of its `/metrics`.

    Raises:
        ScrapeError: it is no address of http or https.
    """
    parts = urlsplit(page_address(text))
    return urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix("/metrics"), query=""))


def ask(
    address: str, *, headers: Mapping[str, str] | None = None, body: bytes | None = None, timeout: float = 10.0
) -> Answer:
    """Return what an address answers, whatever the status.

    Args:
        address: of http or https.
        headers: of the request.
        body: posted; None to get.
        timeout: seconds that may pass without a byte of the answer.

    Raises:
        WebError: there is no answer, or one that is too large.
    """
    request = urllib.request.Request(address, data=body, headers=dict(headers or {}))
    try:
        try:
            response = _OPENER.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:  # an answer all the same
            response = error
        with response:
            status, reason, text = response.status, response.reason, response.read(LARGEST_PAGE + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise WebError(f"{address}: {reason_of(error, timeout)}") from None
    if len(text) > LARGEST_PAGE:
        raise WebError(f"{address}: the answer is larger than {LARGEST_PAGE // 2**20} MiB")
    try:
        return Answer(status, reason or "", json.loads(text))
    except (ValueError, RecursionError):
        return Answer(status, reason or "", None)
