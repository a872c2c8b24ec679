"""HTTP application of the coordinator: the routes of all handlers, and errors as status codes.

The caller's signature is checked before anything of a body is read. Bodies are limited in size and
time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from aiohttp import web

from runspec.core.connection_limits import answering
from runspec.core.errors import NotNow, UserError
from verify.coordinator.edge.requests import Refusal
from verify.coordinator.handlers.context import Handler
from verify.coordinator.journal import Finished
from verify.coordinator.machine.events import IllegalTransition
from verify.request_auth import Unauthorised

_log = logging.getLogger(__name__)


class Server:
    """The endpoints of `docs/coordinator.md`.

    Args:
        routes: endpoints with their handlers.
    """

    def __init__(self, routes: Iterable[web.RouteDef]) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error after which the process must end: the ledger cannot be written."""
        self.application = web.Application(middlewares=[answering, self._errors])
        self.application.add_routes(routes)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            # At debug level, because anybody can cause any number of these lines.
            _log.debug("%s %s refused: %s", request.method, request.path, error)
            return _error(error.status, error.words, error.retry_after_s)
        except Unauthorised as error:
            return _error(401, str(error))
        except Finished:
            return _error(410, "the run is finished")
        except NotNow:
            words = "the coordinator waits for its disk or its database; ask again"
            return _error(503, words)
        except (UserError, IllegalTransition) as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            return _error(503, "the coordinator must be started again")


def _error(status: int, words: str, retry_after_s: float | None = None) -> web.Response:
    headers = None
    if retry_after_s is not None:
        headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return web.json_response({"error": words}, status=status, headers=headers)
