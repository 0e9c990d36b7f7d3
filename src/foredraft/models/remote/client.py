"""Requests to a server: many in flight, and tried again where that can help."""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, final

import httpx2

from foredraft.core.errors import ServerError, UserError

_log = logging.getLogger(__name__)

KEY_VARIABLE = "FOREDRAFT_API_KEY"
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_WORDS = 300  # Letters of a server's own words that an error repeats.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request is tried.

    Attributes:
        attempts: Tries of one request, the first included.
        first_wait, longest_wait: Seconds between tries; doubles from the one to the other. A server's
            Retry-After counts instead, up to the longest.
        timeout: Seconds that one answer may take.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    timeout: float = 600.0

    def wait(self, attempt: int, retry_after: float) -> float:
        """Return the seconds before the next try; `attempt` counts from 0, `retry_after` is 0 where none was given."""
        wait = retry_after or self.first_wait * 2**attempt * random.uniform(0.5, 1.0)
        return min(wait, self.longest_wait)


PATIENT = Patience()


@final
class Client:
    """Talks JSON with one server. Sends the key in FOREDRAFT_API_KEY, if there is one, as a bearer token."""

    def __init__(self, base: str, in_flight: int = 32, patience: Patience = PATIENT) -> None:
        """Store where and how.

        Args:
            base: Address without a trailing slash, such as http://host:8000.
            in_flight: Requests that run at the same time.
        """
        self.base = base
        self._in_flight = in_flight
        self._patience = patience

    def get(self, path: str) -> str:
        """Return the text behind a path; empty where the server does not know it (404, 405 or 501).

        Raises:
            ServerError: it cannot be reached or keeps failing.
            UserError: it refuses the request.
        """
        return asyncio.run(self._get(path))

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]], read: Callable[[int, Any], T]) -> list[T]:
        """Post every body, and return what `read` makes of each index and reply, in the order of the bodies.

        The first request that fails for good, or the first error of `read`, ends the others.

        Raises:
            ServerError: a request failed in all its tries.
            UserError: the server refuses a request.
        """
        return asyncio.run(self._post_all(path, bodies, read))

    async def _get(self, path: str) -> str:
        async with self._session() as session:
            reply = await self._persist(lambda: session.get(path), path, missing_ok=True)
            return reply.text if reply is not None else ""

    async def _post_all(self, path: str, bodies: Sequence[Mapping[str, Any]], read: Callable[[int, Any], T]) -> list[T]:
        gate = asyncio.Semaphore(self._in_flight)
        async with self._session() as session:

            async def one(index: int, body: Mapping[str, Any]) -> T:
                async with gate:
                    reply = await self._persist(lambda: session.post(path, json=body), path)
                    return read(index, reply.json())

            tasks = [asyncio.ensure_future(one(index, body)) for index, body in enumerate(bodies)]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _session(self) -> httpx2.AsyncClient:
        key = os.environ.get(KEY_VARIABLE, "")
        return httpx2.AsyncClient(
            base_url=self.base,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Reading certificates takes longer than a request to this machine.
            verify=self.base.startswith("https://"),
            timeout=httpx2.Timeout(self._patience.timeout, connect=min(10.0, self._patience.timeout)),
            limits=httpx2.Limits(max_connections=self._in_flight, max_keepalive_connections=self._in_flight),
        )

    async def _persist(self, send: Callable[[], Any], path: str, missing_ok: bool = False) -> Any:
        """Return a good reply, after as many tries as it takes and patience allows; None for a missing path."""
        trouble = ""
        for attempt in range(self._patience.attempts):
            retry_after = 0.0
            try:
                reply = await send()
            except httpx2.TransportError as error:
                trouble = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if missing_ok and reply.status_code in (404, 405, 501):
                    return None
                if reply.is_success and (missing_ok or _is_json(reply)):
                    return reply
                if not reply.is_success and reply.status_code not in _BUSY:
                    raise UserError(_refusal(f"{self.base}{path}", reply))
                trouble = _words(reply) if not reply.is_success else "an answer that is no JSON, cut short perhaps"
                retry_after = _retry_after(reply)
            if attempt + 1 < self._patience.attempts:
                _log.debug("%s%s: %s; trying again.", self.base, path, trouble)
                await asyncio.sleep(self._patience.wait(attempt, retry_after))
        raise ServerError(
            f"{self.base}{path} failed {self._patience.attempts} times, at last with {trouble}. Is the server up, and "
            "the address right? What was collected is kept: the same command goes on there. Fewer requests at a time "
            "(--in-flight) help a server that is overrun."
        )


def _is_json(reply: httpx2.Response) -> bool:
    try:
        reply.json()
    except ValueError:
        return False
    return True


def _refusal(url: str, reply: httpx2.Response) -> str:
    if reply.status_code in (401, 403):
        return f"{url} wants a key (status {reply.status_code}): put it in the environment variable {KEY_VARIABLE}."
    if reply.status_code == 404:
        return f"{url} does not exist, or not for this model: {_words(reply)}. Check the address and --model."
    return f"{url} refuses the request: {_words(reply)}"


def _words(reply: httpx2.Response) -> str:
    """Return the status and what the server says of it, on one line."""
    text = " ".join(reply.text.split())
    return f"status {reply.status_code} {text[:_WORDS]}".strip()


def _retry_after(reply: httpx2.Response) -> float:
    """Return the seconds that a server asks to wait, which it gives as a number or as a date; 0 where it does not."""
    value = reply.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
