"""Keeps the program of an interactive job, and connects it to the client that is attached.

Sent along as the source of `python3 -c`: it runs on nodes, with the job's Python (3.8 or newer) and nothing else.

`hold FLAGS IDLE_SECONDS PROGRAM...` is the job's command. It starts the program when the first client attaches: on a
terminal if FLAGS has a `t`, with the client's input if it has an `i`. What the program prints goes to the job's output
and to the client; up to BACKLOG_BYTES of it wait for the next client while there is none. It ends the program after
IDLE_SECONDS without a client, and exits as the program does. Without an `i`, the input `q` kills the program.

`attach` runs in a session of the job and carries the session's streams to and from the holder, by a socket that only
this job's user may use. The newest client takes the place of the one before.

Both ends send frames: a byte that says what it is, the length, the data.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import tty

FIRST_SECONDS = 120.0  # for the first client to attach
KILL_SECONDS = 10.0  # between the signals that end an idle program, and the kill
LINGER_SECONDS = 30.0  # for the client to take the rest of the output
CONNECT_SECONDS = 20.0
PAUSE_SECONDS = 0.02
BACKLOG_BYTES = 1 << 18
PENDING_BYTES = 1 << 16  # beyond which the one who writes has to wait
READ_BYTES = 1 << 15
HEADER = struct.Struct(">cI")
SIZE = struct.Struct(">HH")
BEGIN, DATA, EOF, RESIZE = b"b", b"i", b"e", b"w"  # from the client
OUTPUT, ERROR, EXIT, REPLACED = b"o", b"r", b"x", b"d"  # to the client
KILL_NOW = b"q"
EXIT_LOST, EXIT_REPLACED = 3, 4  # of `attach`; 0 if the program has ended, however: the job's record says how
NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128  # as shells report them
GONE = (errno.EIO, errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


def address() -> str:
    """Return the address of this job's socket, in the abstract namespace."""
    return "\0cotenant-run-{}-{}".format(os.environ.get("COTENANT_JOB_ID", ""), os.environ.get("COTENANT_ATTEMPT", ""))


def is_own(connected: socket.socket) -> bool:
    """Return whether the other end of a socket is a process of this user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def read(descriptor: int) -> bytes | None:
    """Return what can be read; b"" at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in GONE:
            return b""
        raise


class Outgoing:
    """Bytes on their way to a descriptor that does not block. `gone` once nobody reads it any longer."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.pending, self.gone = descriptor, bytearray(), False
        os.set_blocking(descriptor, False)

    def flush(self) -> None:
        """Write what the descriptor takes."""
        try:
            while self.pending and not self.gone:
                del self.pending[: os.write(self.descriptor, self.pending[:READ_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.gone = True

    @property
    def full(self) -> bool:
        """Whether the writer has to wait."""
        return len(self.pending) >= PENDING_BYTES


class Link:
    """A connection between the two ends: frames in both directions."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self.descriptor = connected, connected.fileno()
        self.outgoing, self._received = Outgoing(self.descriptor), bytearray()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a frame, as far as the connection takes it now."""
        self.outgoing.pending += HEADER.pack(kind, len(data)) + data
        self.outgoing.flush()

    def frames(self) -> list[tuple[bytes, bytes]] | None:
        """Return the frames that have arrived completely; None at the end."""
        data = read(self.descriptor)
        if data == b"":
            return None
        self._received += data or b""
        found = []
        while len(self._received) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._received)
            if len(self._received) < HEADER.size + length:
                break
            found.append((kind, bytes(self._received[HEADER.size : HEADER.size + length])))
            del self._received[: HEADER.size + length]
        return found


class Program:
    """The program, its input, and its outputs by descriptor."""

    def __init__(self, words: list[str], flags: str, begin: bytes) -> None:
        self.terminal, self.takes_input = "t" in flags, "i" in flags
        environment = dict(os.environ)
        if self.terminal:
            self.master, slave = os.openpty()
            environment["TERM"] = begin[SIZE.size :].decode("utf-8", "replace") or "dumb"
            self.resize(begin[: SIZE.size])
            given = (slave, slave, slave)
        else:
            given = (subprocess.PIPE if self.takes_input else subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        self.process = subprocess.Popen(
            words,
            stdin=given[0],
            stdout=given[1],
            stderr=given[2],
            env=environment,
            start_new_session=True,
            preexec_fn=own_terminal if self.terminal else None,
        )
        self.input: Outgoing | None = None
        self.outputs: dict[int, bytes] = {}
        if self.terminal:
            os.close(given[0])
            self.input, self.outputs = Outgoing(self.master), {self.master: OUTPUT}
        else:
            out, error, given_input = self.process.stdout, self.process.stderr, self.process.stdin
            assert out is not None
            assert error is not None
            self.outputs = {out.fileno(): OUTPUT, error.fileno(): ERROR}
            for descriptor in self.outputs:
                os.set_blocking(descriptor, False)
            self.input = Outgoing(given_input.fileno()) if given_input else None
        self.input_ended = False

    def resize(self, size: bytes) -> None:
        """Set the size of its terminal."""
        if self.terminal and len(size) == SIZE.size:
            rows, columns = SIZE.unpack(size)
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def flush_input(self) -> None:
        """Write its input on; close it after its end."""
        if self.input is None:
            return
        self.input.flush()
        if self.input.gone:
            self.input.pending.clear()
        if self.input_ended and not self.input.pending and not self.terminal:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.input = None

    def signal(self, number: int) -> None:
        """Send a signal to the program and its group; a terminal that ends hangs up as well, as shells expect."""
        numbers = [number, signal.SIGHUP, signal.SIGCONT] if self.terminal and number == signal.SIGTERM else [number]
        for one in numbers:
            try:
                os.killpg(self.process.pid, one)
            except (ProcessLookupError, PermissionError):
                continue


def own_terminal() -> None:
    """Make stdin the controlling terminal of this process."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Holder:
    """The program, the client, and how long there has been none."""

    def __init__(self, flags: str, idle_seconds: float, words: list[str]) -> None:
        self.flags, self.idle_seconds, self.words = flags, idle_seconds, words
        self.program: Program | None = None
        self.link: Link | None = None
        self.backlog: list[tuple[bytes, bytes]] = []
        self.deadline: float | None = time.monotonic() + FIRST_SECONDS
        self.kill_at: float | None = None
        self.status: int | None = None  # of the program, once it has ended
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(address())
        self.listening.listen(4)
        self.listening.setblocking(False)
        self.wakeup, waking = os.pipe()
        for descriptor in (self.wakeup, waking):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *PASSED_ON):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Hold the program until it has ended and its output was taken; return the exit code."""
        while not self._over():
            self._wait()
            self._check_time()
        if self.link is not None:
            self._say_goodbye(self.link)
        return self.status or 0

    def _over(self) -> bool:
        if self.status is None:
            return False
        if self.program is None:
            return True
        return not (self.program.outputs or (self.link and self.link.outgoing.pending))

    def _wait(self) -> None:
        """Wait for the next thing to happen, and do what it takes."""
        poll = select.poll()
        poll.register(self.listening.fileno(), select.POLLIN)
        poll.register(self.wakeup, select.POLLIN)
        program, link = self.program, self.link
        if link is not None:
            reading = program is None or program.input is None or not program.input.full
            poll.register(
                link.descriptor,
                (select.POLLIN if reading else 0) | (select.POLLOUT if link.outgoing.pending else 0),
            )
        if program is not None:
            for descriptor in program.outputs if not (link and link.outgoing.full) else ():
                poll.register(descriptor, select.POLLIN)
            if program.input is not None and program.input.pending:
                taken = program.outputs if link is None or not link.outgoing.full else {}
                mask = select.POLLOUT | (select.POLLIN if program.input.descriptor in taken else 0)
                poll.register(program.input.descriptor, mask)
        happened = dict(poll.poll(self._timeout()))
        self._handle(happened)

    def _timeout(self) -> float | None:
        if self.status is not None:
            return 0.0 if self.link is None else 1000 * PAUSE_SECONDS
        times = [one for one in (self.deadline, self.kill_at) if one is not None]
        return max(0.0, 1000 * (min(times) - time.monotonic())) if times else None

    def _handle(self, happened: dict[int, int]) -> None:
        if self.wakeup in happened:
            self._signals(read(self.wakeup) or b"")
        if self.link is not None and (events := happened.get(self.link.descriptor, 0)):
            self._from_link(self.link, events)
        if self.program is not None:
            self._outputs(self.program, happened)
            self.program.flush_input()
        if self.link is not None:
            self.link.outgoing.flush()
            if self.link.outgoing.gone:
                self._lost()
        if self.listening.fileno() in happened:
            self._accept()

    def _signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD and self.program is None:
                self.status = SIGNALLED + number
            elif number != signal.SIGCHLD and self.program is not None:
                self.program.signal(number)
        if self.program is not None and self.status is None:
            code = self.program.process.poll()
            if code is not None:
                self.status = code if code >= 0 else SIGNALLED - code

    def _outputs(self, program: Program, happened: dict[int, int]) -> None:
        """Pass on what the program printed. Once it has ended, what is left in its pipes is the end of it."""
        ended = self.status is not None
        if self.link is not None and self.link.outgoing.full:
            return
        for descriptor, kind in list(program.outputs.items()):
            if descriptor not in happened and not ended:
                continue
            data = read(descriptor)
            if data:
                self._print(kind, data)
            elif data == b"" or ended:
                del program.outputs[descriptor]

    def _print(self, kind: bytes, data: bytes) -> None:
        log = 2 if kind == ERROR else 1
        view = memoryview(data)
        while view:
            view = view[os.write(log, view) :]
        if self.link is not None:
            self.link.send(kind, data)
            return
        self.backlog.append((kind, data))
        while sum(len(one) for _, one in self.backlog) > BACKLOG_BYTES:
            del self.backlog[0]

    def _from_link(self, link: Link, events: int) -> None:
        frames = link.frames() if events & select.POLLIN else []
        if frames is None or (events & ENDED and not events & select.POLLIN):
            self._lost()
            return
        for kind, data in frames:
            if kind == BEGIN and self.program is None:
                self._start(data)
            elif self.program is not None:
                self._from_client(self.program, kind, data)

    def _from_client(self, program: Program, kind: bytes, data: bytes) -> None:
        if kind in (BEGIN, RESIZE):
            program.resize(data[: SIZE.size])
        elif kind == DATA and not program.takes_input:
            if data == KILL_NOW:
                program.signal(signal.SIGKILL)
        elif kind == DATA and program.input is not None and not program.input_ended:
            program.input.pending += data
        elif kind == EOF:
            program.input_ended = True

    def _start(self, begin: bytes) -> None:
        try:
            self.program = Program(self.words, self.flags, begin)
        except OSError as error:
            self._print(ERROR if "t" not in self.flags else OUTPUT, f"{self.words[0]}: {error.strerror}\n".encode())
            self.status = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE

    def _accept(self) -> None:
        connected, _ = self.listening.accept()
        if not is_own(connected):
            connected.close()
            return
        if self.link is not None:
            self.link.send(REPLACED)
            self.link.socket.close()
        self.link, self.deadline = Link(connected), None
        for kind, data in self.backlog:
            self.link.send(kind, data)
        self.backlog = []

    def _lost(self) -> None:
        """The client is gone: the program may run on for a while."""
        if self.link is not None:
            self.link.socket.close()
        self.link, self.deadline = None, time.monotonic() + self.idle_seconds

    def _check_time(self) -> None:
        now = time.monotonic()
        if self.kill_at is not None and now >= self.kill_at and self.program is not None:
            self.program.signal(signal.SIGKILL)
            self.kill_at = None
        if self.deadline is None or now < self.deadline or self.status is not None:
            return
        self.deadline = None
        os.write(2, b"cotenant run: ends, as no client is attached\n")
        if self.program is None:
            self.status = SIGNALLED + signal.SIGHUP
        else:
            self.program.signal(signal.SIGTERM)
            self.kill_at = now + KILL_SECONDS

    def _say_goodbye(self, link: Link) -> None:
        """Tell the client that the program has ended, and wait until it has taken the output."""
        link.send(EXIT)
        poll = select.poll()
        poll.register(link.descriptor, select.POLLIN)
        deadline = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < deadline:
            link.outgoing.flush()
            if link.outgoing.gone or (poll.poll(1000 * PAUSE_SECONDS) and link.frames() is None):
                return


class Client:
    """A session's streams, connected to the holder."""

    def __init__(self, link: Link) -> None:
        self.link, self.terminal = link, os.isatty(0)
        self.outputs = {OUTPUT: Outgoing(1), ERROR: Outgoing(2)}
        self.input_open, self.code = True, EXIT_LOST

    def run(self) -> int:
        """Carry the streams until the holder says that the program has ended; return the exit code."""
        begin = b""
        if self.terminal:
            tty.setraw(0, termios.TCSANOW)  # what was typed before is kept
            signal.signal(signal.SIGWINCH, lambda *_: self.link.send(RESIZE, self._size()))
            begin = self._size() + os.environ.get("TERM", "").encode()
        self.link.send(BEGIN, begin)
        while self._step():
            continue
        self._drain()
        return self.code

    def _size(self) -> bytes:
        rows, columns = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8))[:2]
        return SIZE.pack(rows, columns)

    def _step(self) -> bool:
        """Wait for the next thing to happen, and pass it on; return whether the client goes on."""
        poll = select.poll()
        if self.input_open and not self.link.outgoing.full:
            poll.register(0, select.POLLIN)
        full = any(one.full for one in self.outputs.values())
        mask = (0 if full else select.POLLIN) | (select.POLLOUT if self.link.outgoing.pending else 0)
        poll.register(self.link.descriptor, mask)
        for one in self.outputs.values():
            if one.pending and not one.gone:
                poll.register(one.descriptor, select.POLLOUT)
        happened = dict(poll.poll())
        if 0 in happened and self.input_open and not self._read_input():
            return False
        for one in self.outputs.values():
            one.flush()
        if happened.get(self.link.descriptor, 0) & (select.POLLIN | ENDED) and not full:
            return self._read_link()
        self.link.outgoing.flush()
        return True

    def _read_input(self) -> bool:
        data = read(0)
        if data:
            self.link.send(DATA, data)
        elif data == b"":
            self.input_open = False
            self.link.send(EOF)
            return not self.terminal  # it has hung up
        return True

    def _read_link(self) -> bool:
        frames = self.link.frames()
        for kind, data in frames or ():
            if kind == EXIT:
                self.code = 0
                return False
            if kind == REPLACED:
                self.code = EXIT_REPLACED
                return False
            self.outputs[kind].pending += data
            self.outputs[kind].flush()
        return frames is not None

    def _drain(self) -> None:
        """Wait until the session has read everything."""
        for one in self.outputs.values():
            while one.pending and not one.gone:
                poll = select.poll()
                poll.register(one.descriptor, select.POLLOUT)
                poll.poll()
                one.flush()
            while not one.gone and _unread(one.descriptor):
                time.sleep(PAUSE_SECONDS)


def _unread(descriptor: int) -> int:
    """Return how many bytes the reader of a pipe or a terminal has not read yet; 0 of other files, or without one."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if any(events & ENDED for _, events in poll.poll(0)):
        return 0
    try:
        question = termios.TIOCOUTQ if os.isatty(descriptor) else termios.FIONREAD
        (count,) = struct.unpack("i", fcntl.ioctl(descriptor, question, b"\0" * 4))
        return int(count)
    except OSError:
        return 0


def attach() -> int:
    """Connect this session to the holder; return the exit code."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(address())
        except ConnectionRefusedError:  # the holder has not begun, or has ended
            connected.close()
            if time.monotonic() >= deadline:
                return EXIT_LOST
            time.sleep(PAUSE_SECONDS)
            continue
        return Client(Link(connected)).run() if is_own(connected) else EXIT_LOST


def main(arguments: list[str]) -> int:
    """Do what the arguments say; return the exit code."""
    if arguments[0] == "attach":
        return attach()
    return Holder(arguments[1], float(arguments[2]), arguments[3:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
