"""The responses of the routes: pieces of bytes, or an answer that is passed on while it comes."""

from __future__ import annotations

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.answers.answer import Answer
from service.engine.engine import Engine


class AnswerResponse(Response):
    """Sends each piece as it is. The next piece waits until a slow reader has taken this one."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(media_type=answer.media_type, headers={"content-length": str(answer.num_bytes)})
        self._pieces = answer.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": self._pieces[-1]})


class AcceptedResponse(Response):
    """A response that `respond` makes and sends. The request counts as accepted until it is sent."""

    def __init__(self, engine: Engine, respond: ASGIApp) -> None:
        super().__init__()
        self._engine = engine
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._engine.accept():
            await self._respond(scope, receive, send)
