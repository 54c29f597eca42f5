"""The page of a run that goes on, served on this machine only, by a process of its own that reads the record.

A token is part of the address; requests for another host, or from the page of another site, are refused. Served are the
page and the numbers of the records that were asked for: there is no path into the file system.

A ``Board`` holds what there is to see and counts its versions up; a ``Server`` answers viewers, one thread each, while
the thread that called ``follow`` looks whether the record has grown. A page asks for ``/head``, then for the
``/chunk/VERSION/NUMBER`` that its view needs, and keeps ``/events`` open, where each new version is told.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gaff.errors import RecordError
from gaff.record.cube import Cache
from gaff.record.run import ENDING, Record
from gaff.version import __version__
from gaff.views.page.chunks import Chunks
from gaff.views.page.document import Document, page
from gaff.views.page.run import run_of

HOST = "127.0.0.1"
_LOOK_S = 1.0  # how often the files are asked whether they have grown
_SHARE = 0.05  # of a core that reading them again may take
_BEAT_S = 10.0  # between signs of life to viewers
_MOST_VIEWERS = 512
_KEPT = 8  # documents: of the latest versions, and of what was zoomed into
# what reading a record raises that is damaged, or replaced while it is read
_WRONG = (RecordError, OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


class Board:
    """What there is to see now, of one or several records. ``look`` reads on; viewers wait for the next version.

    A version is one document; the last eight stay, so that a page which has the head of an older one can still ask for
    its chunks. One thread looks, any thread may call the other methods: ``_changed`` guards versions and documents,
    ``_reading`` the records, since a look and a zoom both read them. What is wrong with a record is shown in its place
    on the page, and the record is opened anew when its files have changed.
    """

    def __init__(self, paths: Sequence[Path], rank: int = 0) -> None:
        self.paths = list(paths)
        self.token = secrets.token_urlsafe(24)
        self.version = 0
        self.viewers = 0
        self.is_closed = False
        self._rank = rank
        self._records: dict[Path, Record] = {}
        self._sizes: dict[Path, tuple[tuple[str, int, int, int], ...]] = {}
        self._documents: OrderedDict[str, tuple[Document, str]] = OrderedDict()  # by version
        self._zooms: OrderedDict[str, tuple[Document, str]] = OrderedDict()
        self._caches: dict[Path, Cache] = {}
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self.look()

    def look(self) -> bool:
        """Read what has been written since the last look; returns whether there was something.

        The files' sizes and times tell, so a look at a run that stands still costs next to nothing. Where there was
        something, a document is made, and waiting viewers hear of its version.
        """
        sizes = {path: _sizes(path) for path in self.paths}
        if self.version and sizes == self._sizes:
            return False
        self._sizes = sizes
        with self._reading:
            document = self._document()
        with self._changed:
            self.version += 1
            self._keep(self._documents, str(self.version), document)
            self._changed.notify_all()
        return True

    def head(self, begin: int | None = None, end: int | None = None) -> str:
        """The head of the latest version as JSON, or that of a document of its steps ``begin`` to ``end`` only: a zoom.

        A zoom is made when it is first asked for, on the asking thread, and kept while few others are.
        """
        if begin is None or end is None:
            with self._changed:
                return self._documents[str(self.version)][1]
        name = f"{self.version}.{begin}.{end}"
        with self._changed:
            known = self._zooms.get(name)
        if known is None:
            with self._reading:
                document = self._document(begin, end, is_new=False)
            with self._changed:
                known = self._keep(self._zooms, name, document)
        return known[1]

    def chunk(self, version: str, number: int) -> bytes | None:
        """The packed bytes of one chunk of a version, or of a zoom, by the name that the head told.

        None where that is not kept any more: the page then asks for a newer head.
        """
        with self._changed:
            found = self._documents.get(version) or self._zooms.get(version)
            return found[0].chunks.packed[number] if found and 0 <= number < len(found[0].chunks.packed) else None

    def wait(self, known: int) -> int:
        """The latest version, as soon as there is a later one than ``known``; after ten seconds in any case.

        Blocks the calling thread, which is that of one viewer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.version > known or self.is_closed, _BEAT_S)
            return self.version

    def close(self) -> None:
        """Let every waiting viewer go; the event streams end."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def to_html(self) -> str:
        """The page without its numbers: it asks for them."""
        return page(", ".join(one.name for one in self.paths), self.head(), "", connect="'self'")

    def _keep(
        self, where: OrderedDict[str, tuple[Document, str]], name: str, document: Document
    ) -> tuple[Document, str]:
        """Put a document among the latest few of its kind; returns it with the JSON of its head.

        The head told is the document's with the version and the token, which the page needs to ask for chunks.
        """
        told = {**document.head, "live": {"version": name if "." in name else int(name), "token": self.token}}
        where[name] = document, Document(told, document.chunks).head_json()
        while len(where) > _KEPT:
            where.popitem(last=False)
        return where[name]

    def _document(self, begin: int = 0, end: int | None = None, *, is_new: bool = True) -> Document:
        """A document of all records, of the steps from ``begin`` to ``end``; reads on first if ``is_new``.

        A record that is not there yet, or cannot be read, becomes a run without numbers whose verdict says why. Columns
        that were made of the same tables before come from a cache, but for a zoom, whose columns are others.
        """
        chunks = Chunks()
        runs = []
        for path in self.paths:
            try:
                if is_new:
                    self._read(path)
                record = self._records.get(path)
                if record is None:
                    runs.append(_waiting(path, f"waiting for {path} to hold a record"))
                    continue
                share = 1 / len(self.paths)
                cache = self._caches.setdefault(path, Cache()) if is_new else None
                runs.append(run_of(record, chunks, rank=self._rank, share=share, begin=begin, end=end, cache=cache))
            except _WRONG as error:  # whatever is wrong with one record, the page stays
                self._caches.pop(path, None)
                self._records.pop(path, None)  # replaced or damaged: it is opened anew when it has changed
                kind = "" if isinstance(error, RecordError) else f"{type(error).__name__}: "
                runs.append(_waiting(path, f"{path} cannot be shown: {kind}{error}"))
        title = ", ".join(path.name for path in self.paths)
        return Document({"kind": "training", "title": title, "gaff": __version__, "runs": runs}, chunks)

    def _read(self, path: Path) -> None:
        """Open the record as soon as there is one, then read on.

        A log without a byte in it is no record yet: the training has only begun to make it.
        """
        if path in self._records:
            self._records[path].refresh()
        elif any(size for name, size, *_ in self._sizes[path] if name.endswith(ENDING)):
            self._records[path] = Record(path)


class Server(ThreadingHTTPServer):
    """Answers viewers on 127.0.0.1, one thread each; they wait most of the time. ``board``: what is served.

    It listens from the moment it is made, and answers from ``follow`` on, which also closes it.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, board: Board, port: int = 0) -> None:
        """Listen at a port, 0 for any that is free. Raises OSError where it is taken."""
        self.board = board
        super().__init__((HOST, port), _Answer)

    @property
    def url(self) -> str:
        """The address to open, with the token without which nothing is told."""
        return f"http://{HOST}:{self.server_address[1]}/?token={self.board.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a viewer that goes away in the middle of an answer; other errors are told by the base class."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError, socket.timeout)):
            super().handle_error(request, client_address)

    def follow(self, idle_s: float | None = None) -> None:
        """Serve until interrupted; with ``idle_s`` until nothing was written and nobody has looked for so many seconds.

        Blocks; requests are answered on other threads. The record is looked at once a second, and less often where
        reading it takes more than 5 % of a core, since the training that it belongs to may need that core.
        """
        thread = threading.Thread(target=self.serve_forever, name="gaff-page", daemon=True)
        thread.start()
        board = self.board
        seen = time.monotonic()
        try:
            while idle_s is None or time.monotonic() - seen < idle_s:
                began = time.thread_time()  # not the time that goes by: beside a training we wait for a core
                is_new = board.look()
                spent = time.thread_time() - began
                if board.viewers or is_new:
                    seen = time.monotonic()
                time.sleep(max(_LOOK_S, spent / _SHARE - spent))
        finally:
            board.close()
            self.shutdown()
            self.server_close()


class _Answer(BaseHTTPRequestHandler):
    """The answer to one request. Everything but GET is refused by the base class."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "gaff"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Check the host, the origin and the token, in this order, then answer by path; nothing is told before."""
        board = self.server.board
        try:
            parts = urlsplit(self.path)
            asked = parse_qs(parts.query)
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST, "this is no address")
        if not self._is_local():
            self._say(HTTPStatus.FORBIDDEN, "asked by another host or page: expected this machine's own address")
        elif not self._has_token(asked):
            self._say(HTTPStatus.FORBIDDEN, "no token, or a wrong one: open the address that gaff has printed")
        elif parts.path == "/":
            self._send(board.to_html().encode(errors="replace"), "text/html; charset=utf-8")
        elif parts.path == "/head":
            self._head(asked)
        elif parts.path == "/events":
            self._events()
        elif parts.path.startswith("/chunk/"):
            self._chunk(parts.path.split("/")[2:])
        else:
            self._say(HTTPStatus.NOT_FOUND, "there is nothing here")
        return None

    def _is_local(self) -> bool:
        """Whether the request is for this machine's own address, and does not come from a page of another site.

        A page elsewhere can make a browser send requests here, under its own name (``Origin``) or, with a name in DNS
        that points here, under ours (``Host``): both are refused.
        """
        port = self.server.server_address[1]
        hosts = [f"{HOST}:{port}", f"localhost:{port}"]
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in hosts and (origin is None or origin in [f"http://{one}" for one in hosts])

    def _has_token(self, asked: dict[str, list[str]]) -> bool:
        """Whether the request carries the token, in a header or in its address; compared in constant time."""
        header = self.headers.get("Authorization", "").removeprefix("Bearer ")
        given = header or asked.get("token", [""])[0]
        return secrets.compare_digest(given.encode(errors="replace"), self.server.board.token.encode())

    def _head(self, asked: dict[str, list[str]]) -> None:
        """Send the head, of all steps or of those from ``begin`` to ``end``."""
        try:
            begin, end = (int(asked[name][0]) if name in asked else None for name in ("begin", "end"))
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST, "begin and end are steps: expected whole numbers")
        return self._send(self.server.board.head(begin, end).encode(), "application/json")

    def _chunk(self, names: Sequence[str]) -> None:
        """Send one chunk. ``names``: version and number, as the path has them.

        The answer is 410, Gone, where the version is not kept, or the names are none of ours.
        """
        is_number = len(names) == 2 and len(names[1]) < 10 and names[1].isascii() and names[1].isdigit()
        number = int(names[1]) if is_number else -1
        data = self.server.board.chunk(names[0] if names else "", number)
        if data is None:
            return self._say(HTTPStatus.GONE, "this version is not kept any more")
        return self._send(data, "application/octet-stream")

    def _events(self) -> None:
        """Send a line for each new version, and one every ten seconds without any, as server-sent events.

        Lasts until the board closes or the viewer goes. The lines in between are comments of the protocol: only by
        writing does a server notice that a viewer has gone.
        """
        board = self.server.board
        if board.viewers >= _MOST_VIEWERS:
            return self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{_MOST_VIEWERS} pages are open already")
        self.close_connection = True
        self._begin("text/event-stream", None)
        board.viewers += 1
        known = 0
        try:
            while not board.is_closed:
                version = board.wait(known)
                told = f"event: version\ndata: {version}\n\n" if version > known else ": alive\n\n"
                known = version
                self.wfile.write(told.encode())
                self.wfile.flush()
        finally:
            board.viewers -= 1
        return None

    def _send(self, data: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(kind, len(data), status)
        self.wfile.write(data)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(text.encode(), "text/plain; charset=utf-8", status)

    def _begin(self, kind: str, size: int | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send the status line and headers; ``size`` None for an answer without an end that is known."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if size is not None:
            self.send_header("Content-Length", str(size))
        for name, value in (
            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"), ("X-Frame-Options", "DENY"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is the user's."""


def _sizes(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Name, size, identity and time of the last change of each file in a folder; empty where there is no folder.

    The identity (inode) tells a file that was replaced by one of the same name.
    """
    try:
        known = [(one.name, one.stat()) for one in sorted(path.iterdir())]
    except OSError:  # no folder yet, or a file was removed just now
        return ()
    return tuple((name, told.st_size, told.st_ino, told.st_mtime_ns) for name, told in known)


def _waiting(path: Path, why: str) -> dict[str, Any]:
    """A run of which nothing is known yet, in the shape of ``run_of``; ``why`` stands where its verdict would be."""
    return {
        "name": path.name, "path": str(path), "verdict": why, "level": "info", "steps": 0, "complete": False,
        "error": "", "overhead": 0.0, "rank": 0, "ranks": [0], "looks": 0, "lastLook": -1, "command": "", "began": "",
        "facts": [], "notes": [], "findings": [], "sites": [], "groups": [], "scalars": {"names": []}, "models": [],
        "gradients": [], "flight": [], "changes": [], "batches": [],
    }  # fmt: skip
