"""The dashboard as an ASGI application: its pages, their streams, and what may be done there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

import grpc.aio
import jinja2
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from cotenant.client.errors import CotenantError, NotFound, PermissionDenied, Unauthenticated, Unavailable
from cotenant.codec.errors import from_error
from cotenant.rpc.access import Access, AccessError
from cotenant.v1.job_service_pb2 import ListJobsRequest, ReadLogsRequest
from cotenant.web import tenant_board
from cotenant.web.actions import ACTIONS, WORDS, read_wanted, set_priority, try_requests
from cotenant.web.boards import Board
from cotenant.web.changes import Changes
from cotenant.web.guards import Guards
from cotenant.web.lab import EventStream, Lab, read_choices
from cotenant.web.log_tail import LogTail
from cotenant.web.occupancy import DAY_SECONDS
from cotenant.web.principal import Principal, Principals
from cotenant.web.rows import Row, inert_values, to_json
from cotenant.web.sessions import LIFE_SECONDS, Session, Sessions, new_token, same
from cotenant.web.shells import NOT_READ, Shells, read_opening, read_typed
from cotenant.web.streams import COMMENT, ENDED, RETRY, event, follow

HERE = Path(__file__).parent
FORECASTS_MAX = 60  # per request
LOG_TAIL_BYTES = 256 * 1024
LOG_FLUSH_SECONDS = 0.15
LOGIN_PAUSE_SECONDS = 0.5  # after a wrong token
STREAM = "text/event-stream"
PACKED = ".gz"
PLAIN = (
    "queue",
    "cluster",
    "tenants",
    "predictions",
    "incidents",
    "lab",
    "mesh",
)  # pages that their streams fill
GONE = {"error": "your session has ended; log in again"}


@dataclass(frozen=True, slots=True)
class Site:
    """Where the dashboard is served, and how it reaches the mesh."""

    access_of: Callable[[str], Access]  # by API token
    redeem: Callable[[str], str] = field(default=lambda token: "")  # the API token of a login link; "" for a wrong one
    port: int = 0
    https: bool = False
    names: Sequence[str] = ()  # of this machine, beside its addresses
    token_hint: str = ""  # where the reader finds an API token
    trace_url: str = ""  # of a job's trace, with {trace_id}; "": there are no such links
    clock: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Visit:
    """A request of a logged-in browser."""

    session: Session
    principal: Principal
    cookie: str


Handler = Callable[[Request, Visit], Awaitable[Response]]


class Dashboard:
    """The pages of a site, and its sessions."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.sessions = Sessions(site.clock)
        self.principals = Principals(site.access_of, self.sessions.end_all_of)
        self.lab = Lab()
        self.shells = Shells()
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, undefined=jinja2.StrictUndefined
        )
        prefix = "__Host-" if site.https else ""  # cookies do not tell ports apart
        self.cookie, self.login_cookie = f"{prefix}cotenant-{site.port}", f"{prefix}cotenant-login-{site.port}"

    def page(self, name: str, request: Request, code: int = 200, **values: Any) -> HTMLResponse:
        """Return a page."""
        session = values.pop("session", None)
        values = {
            "csrf": session.csrf if session else "",
            "path": request.url.path,
            "notice": "",
            "now": time.time(),
            **values,
        }
        return HTMLResponse(self.templates.get_template(f"{name}.html").render(values), code)

    def set_cookie(self, response: Response, name: str, value: str, seconds: float = LIFE_SECONDS) -> None:
        """Set a cookie that scripts cannot read and other sites do not send."""
        response.set_cookie(
            name, value, max_age=int(seconds), httponly=True, samesite="strict", secure=self.site.https, path="/"
        )

    def visit(self, request: Request) -> Visit | None:
        """Return the visit; None if the browser is not logged in, or no longer."""
        cookie = request.cookies.get(self.cookie, "")
        session = self.sessions.find(cookie)
        return Visit(session, self.principals.of(session.api_token), cookie) if session else None

    # Login ----------------------------------------------------------------------------------------------------------

    async def login(self, request: Request) -> Response:
        """Log in by a link, once, or by an API token."""
        if request.method == "GET":
            token = request.query_params.get("token", "")
            if not token:
                return self.login_page(request)
            api_token = self.site.redeem(token)
            if not api_token:
                words = "This link has been used or has expired: each logs in once. Log in with an API token instead."
                return self.login_page(request, words, 403)
            return self._logged_in(api_token)
        form = await _form(request)
        if not same(form.get("csrf", ""), request.cookies.get(self.login_cookie, "")):
            return self.login_page(request, "The form was too old. Try again.", 403)
        api_token = form.get("token", "").strip()
        if words := await self._refusal_of(api_token):
            await self.principals.forget(api_token)
            await asyncio.sleep(LOGIN_PAUSE_SECONDS)
            return self.login_page(request, words, 403)
        return self._logged_in(api_token)

    def login_page(self, request: Request, words: str = "", code: int = 200) -> Response:
        """Return the page with the form for an API token."""
        csrf = new_token()
        response = self.page("login", request, code, words=words, token_hint=self.site.token_hint, csrf=csrf)
        self.set_cookie(response, self.login_cookie, csrf, 3600)
        return response

    async def _refusal_of(self, api_token: str) -> str:
        """Return why an API token is not accepted; "" if it is."""
        if not api_token or not api_token.isascii() or not api_token.isprintable() or " " in api_token:
            return "That is not an API token."
        try:
            await self.principals.of(api_token).call(lambda mesh: mesh.jobs.ListJobs(ListJobsRequest(page_size=1)))
        except Unauthenticated:
            return "The mesh does not know this token, or it has expired."
        except PermissionDenied:
            return "This token may not read jobs."
        except (CotenantError, AccessError) as error:
            return str(error)
        return ""

    def _logged_in(self, api_token: str) -> Response:
        response = RedirectResponse("/", 303)
        self.set_cookie(response, self.cookie, self.sessions.create(api_token))
        response.delete_cookie(self.login_cookie, path="/", secure=self.site.https, httponly=True, samesite="strict")
        return response

    async def logout(self, request: Request, visit: Visit) -> Response:
        """End the session."""
        self.sessions.end(visit.cookie)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(self.cookie, path="/", secure=self.site.https, httponly=True, samesite="strict")
        return response

    # Pages ----------------------------------------------------------------------------------------------------------

    def plain(self, name: str) -> Handler:
        """Return the handler of a page whose content comes with its stream."""

        async def show(request: Request, visit: Visit) -> Response:
            return self.page(name, request, session=visit.session)

        return show

    async def job(self, request: Request, visit: Visit) -> Response:
        """One job."""
        view = await visit.principal.explain(request.path_params["job_id"])
        job = view["job"]
        may_change = await visit.principal.may_change(job["id"], job["priority"])
        safe = inert_values(view)
        notice = WORDS.get(request.query_params.get("done", ""), "")
        trace = trace_link(self.site.trace_url, view["trace_parent"])
        return self.page(
            "job",
            request,
            session=visit.session,
            view=safe,
            job=safe["job"],
            may_change=may_change,
            notice=notice,
            trace=trace,
        )

    async def shell(self, request: Request, visit: Visit) -> Response:
        """A shell in a running job, for principals that may change the job."""
        view = await visit.principal.explain(request.path_params["job_id"])
        job = view["job"]
        await self._check_may_change(visit, job)
        asked = request.query_params.get("rank", "")
        safe = inert_values(view)
        return self.page(
            "shell",
            request,
            session=visit.session,
            job=safe["job"],
            ranks=safe["ranks"],
            rank=asked if asked.isdigit() else "",
        )

    async def _check_may_change(self, visit: Visit, job: Row) -> None:
        if not await visit.principal.may_change(job["id"], job["priority"]):
            raise PermissionDenied("your API token may not change this job")

    async def tenant(self, request: Request, visit: Visit) -> Response:
        """One tenant."""
        name = request.path_params["tenant"]
        await tenant_board.check(visit.principal.call, name)
        return self.page("tenant", request, session=visit.session, tenant=inert_values(name))

    # Streams --------------------------------------------------------------------------------------------------------

    def stream(
        self, request: Request, visit: Visit, tables: dict[str, Changes], board: Board | None = None
    ) -> Response:
        """Return a stream of tables, from where the page was; a board is read meanwhile."""
        seen = request.headers.get("last-event-id") or request.query_params.get("after", "")

        async def events() -> AsyncIterator[str]:
            with visit.principal.reading(), board.reading() if board else contextlib.nullcontext():
                async for text in follow(tables, seen, lambda: self.is_alive(visit)):
                    yield text

        return StreamingResponse(events(), media_type=STREAM)

    def is_alive(self, visit: Visit) -> bool:
        """Return whether the session of a visit goes on."""
        return self.sessions.find(visit.cookie) is visit.session

    def tables(self, tables_of: Callable[[Principal], dict[str, Changes]]) -> Handler:
        """Return the handler of a stream of tables, which always tells of the mesh too."""

        async def show(request: Request, visit: Visit) -> Response:
            return self.stream(request, visit, {**tables_of(visit.principal), "meta": visit.principal.meta})

        return show

    def board(self, name: str, tables_of: Callable[[Principal], dict[str, Changes]] = lambda _: {}) -> Handler:
        """Return the handler of the stream of a page that has a board."""

        async def show(request: Request, visit: Visit) -> Response:
            principal = visit.principal
            board = principal.board(name)
            tables = {**tables_of(principal), "board": board.rows, "meta": principal.meta}
            return self.stream(request, visit, tables, board)

        return show

    async def job_events(self, request: Request, visit: Visit) -> Response:
        """One job as it changes."""
        job_id, principal = request.path_params["job_id"], visit.principal
        await principal.explain(job_id)  # of another tenant: 404

        async def events() -> AsyncIterator[str]:
            with principal.reading():
                async with principal.story(job_id) as story:
                    tables = {"job": story.job, "samples": story.samples, "meta": principal.meta}
                    seen = request.headers.get("last-event-id") or request.query_params.get("after", "")
                    async for text in follow(tables, seen, lambda: self.is_alive(visit)):
                        yield text

        return StreamingResponse(events(), media_type=STREAM)

    async def logs(self, request: Request, visit: Visit) -> Response:
        """The output of a job: its end, then what is added. A stream that was cut begins anew, and says so."""
        job_id, rank = request.path_params["job_id"], request.query_params.get("rank", "")
        await visit.principal.explain(job_id)
        asked = ReadLogsRequest(id=job_id, follow=True, tail_bytes=LOG_TAIL_BYTES)
        if rank.isascii() and rank.isdigit() and len(rank) < 7:
            asked.rank = int(rank)
        return StreamingResponse(self._log_events(visit, asked), media_type=STREAM)

    async def _log_events(self, visit: Visit, asked: ReadLogsRequest) -> AsyncIterator[str]:
        tail, ended = LogTail(), ""
        yield RETRY + event("begin", "{}")

        async def read() -> str:
            try:
                async for piece in visit.principal.mesh.jobs.ReadLogs(asked):
                    tail.feed(piece.rank, piece.data)
            except grpc.aio.AioRpcError as error:
                return from_error(error).message
            return ""

        reading = asyncio.create_task(read())
        try:
            while self.is_alive(visit):
                finished = reading.done()
                if batch := tail.take():
                    yield event("lines", to_json(batch))
                if finished:
                    ended = reading.result()
                    yield event("end", to_json({"why": ended}))
                    return
                await asyncio.wait({reading}, timeout=LOG_FLUSH_SECONDS)
            yield ENDED
        finally:
            reading.cancel()

    # Questions and actions ------------------------------------------------------------------------------------------

    async def forecasts(self, request: Request, visit: Visit) -> Response:
        """When some jobs will start and finish."""
        return await _of_ids(request, visit.principal.forecast)

    async def places(self, request: Request, visit: Visit) -> Response:
        """The places of some waiting jobs in the order, and what decides them."""
        return await _of_ids(request, visit.principal.place)

    async def held_at(self, request: Request, visit: Visit) -> Response:
        """What jobs held on each node at a moment of the last day."""
        asked, now = request.query_params.get("at", ""), self.site.clock()
        at = float(asked) if asked.isascii() and asked.isdigit() and len(asked) <= 12 else -1.0
        if not now - DAY_SECONDS - 60 <= at <= now + 60:
            return JSONResponse({"error": "choose a moment of the last day"}, 400)
        return _json({"at": at, "nodes": visit.principal.occupancy.at(at)})

    async def usage(self, request: Request, visit: Visit) -> Response:
        """What was used in the last weeks, of one tenant or of all that the principal may see."""
        ask, tenant = visit.principal.call, request.query_params.get("tenant", "")
        if tenant:
            await tenant_board.check(ask, tenant)
        return _json(await tenant_board.usage(ask, tenant))

    async def what_if(self, request: Request, visit: Visit) -> Response:
        """What would happen to one more job like this, with other requests."""
        wanted = read_wanted(await request.body())
        job_id = request.path_params["job_id"]
        return _json(await visit.principal.call(lambda mesh: try_requests(mesh, job_id, wanted)))

    async def simulate(self, request: Request, visit: Visit) -> Response:
        """Simulate today's jobs under other policies: a stream that ends with the result. Closing it stops the run."""
        choices = read_choices(await request.body())
        token = visit.session.api_token
        runs = self.lab.run(visit.principal, lambda: self.site.access_of(token), choices)

        async def events() -> AsyncGenerator[str]:
            async with contextlib.aclosing(runs):
                async for one in runs:
                    if not self.is_alive(visit):
                        yield ENDED
                        return
                    yield event(one.name, one.data) if one.name else COMMENT

        return EventStream(events(), media_type=STREAM)

    async def open_shell(self, request: Request, visit: Visit) -> Response:
        """Open a shell in a running job: a stream of its output. Closing it ends the shell."""
        opening = read_opening(await request.body())
        view = await visit.principal.explain(request.path_params["job_id"])  # of another tenant: 404
        job = view["job"]
        await self._check_may_change(visit, job)
        self.shells.check_room(visit.session)
        mesh = visit.principal.mesh
        events = self.shells.run(mesh, visit.session, job["id"], opening, lambda: self.is_alive(visit))

        async def used() -> AsyncGenerator[str]:
            with visit.principal.reading():
                async with contextlib.aclosing(events):
                    async for text in events:
                        yield text

        return EventStream(used(), media_type=STREAM)

    async def type_into_shell(self, request: Request, visit: Visit) -> Response:
        """Pass on what was typed into a shell, or the new size of its terminal."""
        shell = self.shells.find(request.path_params["shell_id"], visit.session)
        if not await shell.send(read_typed(await request.body())):
            return JSONResponse({"error": NOT_READ}, 429)
        return Response(status_code=204)

    async def act(self, request: Request, visit: Visit) -> Response:
        """Cancel, suspend, resume or rerun a job, or change its priority."""
        job_id, name = request.path_params["job_id"], request.path_params["action"]
        if name == "priority":
            wanted = (await _form(request)).get("priority", "")
            await visit.principal.call(lambda mesh: set_priority(mesh, job_id, wanted))
        elif name not in ACTIONS:
            raise HTTPException(404)
        elif made := await visit.principal.call(lambda mesh: ACTIONS[name](mesh, job_id)):
            job_id = made
        return RedirectResponse(f"/jobs/{quote(job_id, safe='')}?done={name}", 303)


def trace_link(url: str, trace_parent: str) -> str:
    """Return the address of a job's trace; "" without one.

    >>> trace_link("https://jaeger/trace/{trace_id}", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    'https://jaeger/trace/0af7651916cd43dd8448eb211c80319c'
    >>> trace_link("https://jaeger/trace/{trace_id}", "00-../../x-1-01"), trace_link("", "")
    ('', '')
    """
    found = re.fullmatch("[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}", trace_parent)
    return url.replace("{trace_id}", found[1]) if url and found else ""


async def _of_ids(request: Request, find: Callable[[str], Awaitable[Row]]) -> Response:
    """Return what is found for each of the ids in the query."""
    ids = [one for one in request.query_params.get("ids", "").split(",") if one][:FORECASTS_MAX]
    found = await asyncio.gather(*(find(one) for one in ids))
    return _json(dict(zip(ids, found, strict=True)))


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form, as browsers send those without files."""
    return dict(parse_qsl((await request.body()).decode(errors="replace"), max_num_fields=20))


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def wants_page(request: Request) -> bool:
    """Return whether an answer is shown to a reader, not to a script of ours."""
    return not request.url.path.startswith(("/api/", "/events/"))


class Static(StaticFiles):
    """Our files, which browsers keep but ask for: they change with the version."""

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        """Return a file."""
        response = super().file_response(*arguments, **named)
        response.headers["cache-control"] = "no-cache"
        if str(arguments[0] if arguments else named["full_path"]).endswith(PACKED):
            response.headers["content-encoding"] = "gzip"
        return response

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """Return a file; large ones of others are kept compressed, and browsers unpack them."""
        found = super().lookup_path(path)
        return found if found[1] else super().lookup_path(path + PACKED)


def application(site: Site) -> ASGIApp:
    """Return the application of a site."""
    board = Dashboard(site)

    def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            visit = board.visit(request)
            if visit is None:
                if not wants_page(request):
                    return JSONResponse(GONE, 401)
                words = "Your session has ended. Log in again." if request.cookies.get(board.cookie) else ""
                return board.login_page(request, words, 401)
            if request.method == "POST" and not await _has_csrf(request, visit.session):
                raise HTTPException(403, "The form was too old. Open the page again.")
            return await handler(request, visit)

        return answer

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        dropping = asyncio.create_task(board.principals.drop_idle())
        try:
            yield
        finally:
            dropping.cancel()
            await board.principals.close()

    routes = [
        Route("/", guarded(board.plain("jobs"))),
        Route("/login", board.login, methods=["GET", "POST"]),
        Route("/logout", guarded(board.logout), methods=["POST"]),
        *(Route(f"/{name}", guarded(board.plain(name))) for name in PLAIN),
        Route("/tenants/{tenant}", guarded(board.tenant)),
        Route("/jobs/{job_id}", guarded(board.job)),
        Route("/jobs/{job_id}/shell", guarded(board.shell)),
        Route("/jobs/{job_id}/{action}", guarded(board.act), methods=["POST"]),
        Route("/api/forecasts", guarded(board.forecasts)),
        Route("/api/places", guarded(board.places)),
        Route("/api/cluster", guarded(board.held_at)),
        Route("/api/usage", guarded(board.usage)),
        Route("/api/lab", guarded(board.simulate), methods=["POST"]),
        Route("/api/jobs/{job_id}/whatif", guarded(board.what_if), methods=["POST"]),
        Route("/api/jobs/{job_id}/shell", guarded(board.open_shell), methods=["POST"]),
        Route("/api/shells/{shell_id}", guarded(board.type_into_shell), methods=["POST"]),
        Route("/events/jobs", guarded(board.tables(lambda one: {"jobs": one.jobs}))),
        Route("/events/queue", guarded(board.board("queue", lambda one: {"jobs": one.jobs}))),
        Route("/events/tenants", guarded(board.board("tenants"))),
        Route("/events/predictions", guarded(board.board("predictions"))),
        Route("/events/incidents", guarded(board.board("incidents", lambda one: {"jobs": one.jobs}))),
        Route("/events/lab", guarded(board.board("lab"))),
        Route("/events/cluster", guarded(board.board("cluster", lambda one: {"nodes": one.nodes}))),
        Route("/events/mesh", guarded(board.tables(lambda _: {}))),
        Route("/events/jobs/{job_id}", guarded(board.job_events)),
        Route("/events/jobs/{job_id}/logs", guarded(board.logs)),
        Mount("/static", Static(directory=HERE / "static")),
    ]
    handlers: Any = {
        HTTPException: board_error(board),
        CotenantError: board_error(board),
        AccessError: board_error(board),
    }
    return Guards(Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers), site.names)


async def _has_csrf(request: Request, session: Session) -> bool:
    given = request.headers.get("x-csrf-token") or (await _form(request)).get("csrf", "")
    return same(given, session.csrf)


def board_error(board: Dashboard) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler of errors: a page for readers, JSON for scripts."""

    async def answer(request: Request, error: Exception) -> Response:
        status, words = _in_words(error, request.url.path)
        visit = board.visit(request)
        if isinstance(error, Unauthenticated) and visit:
            board.sessions.end_all_of(visit.session.api_token)
            visit = None
        if not wants_page(request):
            return JSONResponse({"error": words}, status)
        session = visit.session if visit else None
        return board.page("error", request, status, session=session, status=status, words=words)

    return answer


def _in_words(error: Exception, path: str) -> tuple[int, str]:
    """Return the status of an error, and what it says. What another tenant has does not exist for this one."""
    if isinstance(error, HTTPException):
        return error.status_code, "There is no such page." if error.status_code == 404 else error.detail
    if isinstance(error, NotFound | PermissionDenied):
        if path.startswith("/api/shells"):
            return 404, "This shell has ended."
        what = "tenant" if path.startswith(("/tenants", "/api/usage")) else "job"
        return 404, f"There is no such {what}, or it is not yours to see."
    if isinstance(error, Unauthenticated):
        return 401, GONE["error"]
    if isinstance(error, Unavailable | AccessError):
        return 503, f"The mesh does not answer: {error}"
    return 400, str(error)
