"""`Runtime`, `Region` and `local`.

The rule it keeps: a memory server that `local` started lives as long as anything needs it: the
runtime, or an array. How arrays behave is left to `_arrays`.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import faulthandler
import itertools
import operator
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy

from farpage import _farpage
from farpage._arrays import Living, Mapping, RemoteArray, _at_exit, mappings, notice_handlers

#: numpy's types that Rust has a name for.
_NUMBERS = {
    f"{kind}{8 * size}": np.dtype(f"{letter}{size}")
    for kind, letter, sizes in (("i", "i", (1, 2, 4, 8)), ("u", "u", (1, 2, 4, 8)), ("f", "f", (4, 8)))
    for size in sizes
}
_NAMES = {dtype: name for name, dtype in _NUMBERS.items()}
#: Before what numpy calls a type that Rust has no name for.
_NUMPY = "numpy:"

_own_numbers = itertools.count(1)
#: Where arrays that were pickled by name are opened.
_runtimes: Living[Runtime] = Living()
_unpickled: dict[tuple[str, ...], Runtime] = {}
_lock = threading.Lock()

# By its process: a child made by fork has this list of things to do, too.
atexit.register(_at_exit, os.getpid())


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of a runtime since it was made. Counts are of pages unless the name says bytes."""

    faults: int
    """Page faults."""
    fills: int
    """Pages brought in, for a fault or ahead of one."""
    prefetches: int
    """Of these, pages brought in ahead of need."""
    evictions: int
    """Pages taken out."""
    clean_evictions: int
    """Of these, pages that had not changed."""
    poisoned: int
    """Pages that could not be brought in and raise SIGBUS."""
    failed_evictions: int
    """Evictions that failed, so that the page stayed."""
    resident_bytes: int
    """Bytes of pages that are in local memory now."""
    peak_resident_bytes: int
    """The most that it ever was."""
    budget_bytes: int
    """The budget."""
    bytes_read: int
    """Bytes read from servers."""
    bytes_written: int
    """Bytes written to servers."""
    compression_ratio: float | None
    """Bytes of changed pages over bytes stored; none before anything was stored."""
    summary: str
    """All of it in a line."""

    def __str__(self) -> str:
        return self.summary


class Runtime:
    """Memory servers, and a budget of local memory for the pages of all arrays together.

    `url` is a server, such as `tcp://10.0.0.2:7400` or `shm:///run/farpage.sock`, or several: a list
    of them, or a text with commas between them. What is not given comes from the environment:
    `FARPAGE_SERVER`, `FARPAGE_BUDGET`, `FARPAGE_PAGE_SIZE`, `FARPAGE_CODEC`,
    `FARPAGE_REDUNDANCY`, `FARPAGE_FAULT_MODE`, `FARPAGE_DEADLINE` (seconds) and
    `FARPAGE_KEY_FILE`. Sizes are bytes, or text such as "4GiB".

    `fault_mode` is "filler" (the default) or "in-thread". With the latter the thread that touches a
    page fetches it, which is faster on small pages, but a system call that is given absent memory
    fails.

    `faulthandler` is enabled, so that a program that is ended by a lost page says where it was.
    """

    def __init__(
        self,
        url: str | Iterable[str] | None = None,
        *,
        budget: int | str | None = None,
        page_size: int | str | None = None,
        codec: str | None = None,
        redundancy: str | None = None,
        fault_mode: str | None = None,
        deadline: float | None = None,
        key_file: str | os.PathLike[str] | None = None,
        _server: _Server | None = None,
    ) -> None:
        _enable_faulthandler()
        self._server = _server
        self._native = _farpage.Runtime(
            [url] if isinstance(url, str) else list(url or ()),
            keep=_server,
            budget_bytes=_bytes(budget),
            page_bytes=_bytes(page_size),
            codec=codec,
            redundancy=redundancy,
            fault_mode=fault_mode,
            deadline_s=deadline,
            key_file=key_file,
        )
        self._in_thread = (
            fault_mode or os.environ.get("FARPAGE_FAULT_MODE", "filler")
        ) == "in-thread"
        self.servers: tuple[str, ...] = tuple(self._native.endpoints())
        #: What `allocate` takes memory from, once it was called.
        self._arena: _farpage.Arena | None = None
        self._arena_lock = threading.Lock()
        _runtimes.add(self)

    def zeros(
        self,
        shape: int | Iterable[int],
        dtype: Any = float,
        order: Literal["C", "F"] = "C",
        *,
        page_size: int | str | None = None,
        codec: str | None = None,
        redundancy: str | None = None,
    ) -> RemoteArray:
        """An array of zeros, which is gone with the last view of it.

        `order` says whether the last side is contiguous, as in C, or the first, as in Fortran.
        `page_size` is a power of two from 4 KiB to 2 MiB: small pages suit scattered accesses. By
        default it is the runtime's, or 64 KiB. `codec` says how pages are stored on the servers:
        "raw" (the default), "lz4", "shuffle", "adaptive", "zfp:accuracy=1e-6" (which loses
        precision). `redundancy` says how pages outlive the death of servers: "none" (the
        default), "copies=2" to "copies=4", of which all but one may die, or "parity=2+1" to
        "parity=8+2", of which as many may die as the number behind the plus.

        Raises `CapacityError`, a `MemoryError`, if the servers have no room for it.
        """
        if order not in ("C", "F"):
            raise ValueError(f"order={order!r}: need 'C' or 'F'")
        native = self._create(None, shape, dtype, page_size, codec, redundancy, order=order)
        return native.array(order)

    def empty(
        self,
        shape: int | Iterable[int],
        dtype: Any = float,
        order: Literal["C", "F"] = "C",
        *,
        page_size: int | str | None = None,
        codec: str | None = None,
        redundancy: str | None = None,
    ) -> RemoteArray:
        """The same as `zeros`: pages that nobody has written are zeros, and cost nothing."""
        return self.zeros(
            shape, dtype, order, page_size=page_size, codec=codec, redundancy=redundancy
        )

    def ones(
        self,
        shape: int | Iterable[int],
        dtype: Any = float,
        order: Literal["C", "F"] = "C",
        *,
        page_size: int | str | None = None,
        codec: str | None = None,
        redundancy: str | None = None,
    ) -> RemoteArray:
        """An array of ones, as `zeros` else."""
        return self.full(
            shape, 1, dtype, order, page_size=page_size, codec=codec, redundancy=redundancy
        )

    def full(
        self,
        shape: int | Iterable[int],
        fill_value: Any,
        dtype: Any = None,
        order: Literal["C", "F"] = "C",
        *,
        page_size: int | str | None = None,
        codec: str | None = None,
        redundancy: str | None = None,
    ) -> RemoteArray:
        """An array of `fill_value`, whose type it has by default; as `zeros` else."""
        dtype = np.asarray(fill_value).dtype if dtype is None else dtype
        array = self.zeros(
            shape, dtype, order, page_size=page_size, codec=codec, redundancy=redundancy
        )
        np.copyto(array, fill_value, casting="unsafe")
        return array

    def create(
        self,
        name: str,
        shape: int | Iterable[int],
        dtype: Any = float,
        *,
        page_size: int | str | None = None,
        codec: str | None = None,
        redundancy: str | None = None,
        replace: bool = False,
    ) -> Region:
        """An array of zeros under a name, in C's order, which outlives this program:
        `Region.close`, `farpage.flush` and a program's orderly end publish it.

        Raises `FileExistsError` if the name exists, unless it is to be replaced.
        """
        return Region(self._create(name, shape, dtype, page_size, codec, redundancy, replace))

    def open(self, name: str, mode: str = "r", *, dtype: Any = None) -> Region:
        """The array that was published under `name`, to be read ("r") or changed, too ("r+").

        Any number of programs read a name at a time, each the version that was published when it
        opened it, until it closes it. One program at a time has it open to change it.

        The array has the type that it was created with, and a `dtype` that is given has to be the
        same: use `ndarray.view` for others. Types of Rust's or C's that numpy does not know open as
        any of the same size, and bytes without a type as any that they hold a whole number of.

        Raises `FileNotFoundError` if no server has it, `InUseError` if it is to be changed and
        somebody else has it open for that, `ValueError` if it is of another type.
        """
        if mode not in ("r", "r+"):
            raise ValueError(f"mode={mode!r}: need 'r' or 'r+'")
        wanted = None if dtype is None else np.dtype(dtype)
        native = self._native.open(name, to_read=mode == "r", keep=self._server)
        try:
            shape, dtype = _shape_and_type(name, native, wanted)
        except Exception:
            native.abandon()
            native.close()
            raise
        return Region(self._mapping(native, shape, dtype, name, mode))

    def allocate(
        self, min_bytes: int | str = "1MiB", *, capacity: int | str | None = None
    ) -> Allocate:
        """A context manager: in its block numpy's own arrays of `min_bytes` and more lie in remote
        memory, and smaller ones where they did before.

        It holds for the context: asyncio's tasks inherit it, threads do not. Arrays may outlive the
        block and the runtime. An array that grows by `ndarray.resize` stays where it is.

        With a `capacity`, which the first call may set, the servers reserve so many bytes at once,
        and an array that does not fit is a `MemoryError`. Without, they grant memory as it is
        written to; when they are full, pages stay in local memory, and the program stalls when
        that is full, too.
        """
        with self._arena_lock:
            if self._arena is None:
                self._arena = self._native.arena(_bytes(capacity), keep=self._server)
            elif capacity is not None:
                raise ValueError(
                    "this runtime allocates already: give the capacity to its first `allocate`"
                )
        return Allocate(self._arena, _bytes(min_bytes) or 0)

    def names(self) -> list[str]:
        """What this user has published under names."""
        return [name for name, _, _ in self._native.names()]

    def remove(self, name: str) -> None:
        """Removes what was published under `name`, and frees its memory. Programs that read it keep
        it until they close it.

        Raises `InUseError` if it is open to be changed.
        """
        self._native.remove(name)

    def stats(self) -> Stats:
        """Figures since the runtime was made."""
        return Stats(**self._native.stats())

    def close(self) -> None:
        """Closes named regions that are open, and the runtime.

        Raises `BufferError` if there are arrays of it. An array that another thread is just being
        given counts, or that thread's call raises `ValueError`.
        """
        self._close(publish=True)

    def _close(self, *, publish: bool) -> None:
        self._native.close(publish)
        if self._server is not None:
            self._server.end()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(publish=False)
        except BufferError:
            pass  # The traceback holds arrays. They, and the runtime with them, end a little later.

    def __repr__(self) -> str:
        return f"<farpage.Runtime at {', '.join(self.servers) or 'no server'}>"

    def _create(
        self,
        name: str | None,
        shape: int | Iterable[int],
        dtype: Any,
        page_size: int | str | None,
        codec: str | None,
        redundancy: str | None,
        replace: bool = False,
        order: Literal["C", "F"] = "C",
    ) -> Mapping:
        dtype = np.dtype(dtype)
        sides = _sides(shape)
        if dtype.subdtype is not None:
            dtype, inner = dtype.subdtype
            sides += inner
        if dtype.hasobject:
            raise TypeError(
                f"elements of type {dtype} are references to Python objects, which have no meaning "
                "in remote memory: use a type of fixed size"
            )
        if dtype.itemsize == 0:
            raise ValueError(f"elements of type {dtype} have no bytes: give their length, as in 'U16'")
        if name is not None and not sides:
            raise ValueError("an array with a name needs a dimension: use shape (1,)")
        native = self._native.create(
            # As the elements lie in memory: codecs look at neighbours.
            sides if order == "C" else sides[::-1],
            _type_name(dtype),
            dtype.itemsize,
            dtype.alignment,
            keep=self._server,
            name=name,
            replace=replace,
            page_bytes=_bytes(page_size),
            codec=codec,
            redundancy=redundancy,
        )
        return self._mapping(native, sides, dtype, name, "r+")

    def _mapping(
        self,
        native: _farpage.Region,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        name: str | None,
        mode: str,
    ) -> Mapping:
        notice_handlers(self._in_thread)
        return Mapping(
            native, shape, dtype,
            servers=self.servers, in_thread=self._in_thread, name=name, mode=mode,
        )


class Allocate:
    """What `Runtime.allocate` returns."""

    def __init__(self, arena: _farpage.Arena, min_bytes: int) -> None:
        self._arena = arena
        self._min_bytes = min_bytes
        #: The handlers before each block that is open.
        self._before: list[object] = []

    def __enter__(self) -> None:
        self._before.append(_farpage.set_handler(self._arena.handler(self._min_bytes)))

    def __exit__(self, *error: object) -> None:
        _farpage.set_handler(self._before.pop())


class Region:
    """An array under a name. Made by `Runtime.create` and `Runtime.open`.

    As a context manager it is closed at the end of the block. A block that ends by an exception
    publishes nothing: the version that was published before stays.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping

    @property
    def name(self) -> str:
        assert self._mapping.name is not None
        return self._mapping.name

    @property
    def closed(self) -> bool:
        return self._mapping.native.closed

    def array(self) -> RemoteArray:
        """The array, of shape and type as it was created. All arrays of a region share its
        memory."""
        return self._mapping.array()

    def flush(self) -> None:
        """Publishes the array as it is now: see `farpage.flush`."""
        if self._mapping.mode == "r":
            raise ValueError(f"`{self.name}` was opened for reading: open it with mode='r+'")
        self._mapping.native.flush()

    def close(self) -> None:
        """Publishes what changed and closes the region. Closing it again does nothing.

        Raises `BufferError` while there are arrays of it, `PageError` if it could not be written
        back: then it is still open, with everything that is in it.
        """
        self._mapping.native.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._mapping.native.abandon()
        try:
            self.close()
        except BufferError:
            pass  # The traceback holds arrays. The region ends with the last of them.

    def __repr__(self) -> str:
        state = "closed" if self.closed else self._mapping.mode
        return f"<farpage.Region {self.name!r}, {self._mapping.shape} of {self._mapping.dtype}, {state}>"


def local(
    *,
    budget: int | str | None = None,
    capacity: int | str | None = None,
    url: str | None = None,
    **options: Any,
) -> Runtime:
    """A runtime with a memory server of its own, a process on this machine: to try farpage, and
    for arrays that compress well.

    The server lends up to `capacity` bytes, half of what is available by default, and takes memory
    as pages are written to it. It ends with the runtime and its arrays, and with this process. It
    listens on a socket in the directory for temporary files, or at `url`, such as
    `tcp://127.0.0.1:0`. `options` are those of `Runtime`.
    """
    if url is None:
        file = f"farpage-python-{os.getpid()}-{next(_own_numbers)}.sock"
        url = f"shm://{os.path.join(tempfile.gettempdir(), file)}"
    lent = _bytes(capacity)
    server = _Server(url, lent if lent is not None else _farpage.available_bytes() // 2)
    return Runtime(server.endpoint, budget=budget, _server=server, **options)


#: Loads the library by its path: the package would bring numpy in.
_SERVE = """
import sys
from importlib import machinery, util
path, listen, capacity_bytes, parent = sys.argv[1:]
loader = machinery.ExtensionFileLoader("_farpage", path)
module = util.module_from_spec(util.spec_from_file_location("_farpage", path, loader=loader))
loader.exec_module(module)
module.serve(listen, int(capacity_bytes), int(parent))
"""


class _Server:
    """A memory server's process."""

    def __init__(self, listen: str, capacity_bytes: int) -> None:
        if not sys.executable:
            raise _farpage.Error(
                "a memory server of this program's own is a process of its interpreter, whose file "
                "is not known here (sys.executable is empty): start `farpage-memserver serve` and "
                "name it by `Runtime(url)`"
            )
        arguments = [_farpage.__file__, listen, str(capacity_bytes), str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SERVE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for the program; the server notices its end.
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode().strip()
        self.process.stdout.close()
        if not line or line.startswith("error: "):
            self.process.communicate()
            why = line.removeprefix("error: ") or f"it ended with {self.process.returncode}"
            raise _farpage.Error(f"the memory server did not start: {why}")
        self.endpoint = line
        self._end = weakref.finalize(self, _end, self.process, os.getpid())
        # The kernel closes the pipe at this process's end, after all that may need the server.
        self._end.atexit = False

    def end(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    # A child made by fork has the pipe, too, but the server is its parent's.
    if os.getpid() != pid:
        return
    assert process.stdin is not None
    try:
        # Its end alone is not seen while a child of this process has it open.
        process.stdin.write(b"\n")
        process.stdin.close()
    except OSError:
        pass  # It has ended already.
    process.wait()


def opened(
    servers: tuple[str, ...], name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> RemoteArray:
    """Gives the array of a name, shape and type as this process has it open, else as published.

    Raises `ValueError` if it was replaced by one of another shape or type.
    """
    wanted = (servers, name, shape, _type_name(dtype))
    for mapping in mappings.snapshot():
        if mapping.name != name or mapping.native.closed:
            continue
        if (mapping.servers, name, mapping.shape, _type_name(mapping.dtype)) == wanted:
            try:
                return mapping.array()
            except _farpage.Closed:
                pass  # By another thread, just now.
    region = _open_at(servers, name, dtype)
    found = region._mapping.shape
    if found != shape:
        region.close()
        raise ValueError(
            f"`{name}` had the shape {shape} when it was pickled, and has {found} now: it was "
            "replaced, so pickle it again"
        )
    return region.array()


def _open_at(servers: tuple[str, ...], name: str, dtype: np.dtype[Any]) -> Region:
    """Opens what was published under `name`, to read it, with a runtime of this process at
    `servers`, which is made if there is none."""
    for runtime in _runtimes.snapshot():
        if runtime.servers == servers and not runtime._native.closed:
            try:
                return runtime.open(name, dtype=dtype)
            except _farpage.Closed:
                pass  # By another thread, just now.
    with _lock:
        own = _unpickled.get(servers)
        if own is None or own._native.closed:
            own = _unpickled[servers] = Runtime(servers)
    return own.open(name, dtype=dtype)


def _enable_faulthandler() -> None:
    if faulthandler.is_enabled():
        return
    for options in ({}, {"file": 2}):
        try:
            faulthandler.enable(**options)  # type: ignore[arg-type]
            return
        except (AttributeError, OSError, RuntimeError, ValueError):
            pass  # Standard error is no file here, as in a notebook, or there is none.


def _bytes(size: int | str | None) -> int | None:
    if size is None:
        return None
    if isinstance(size, str):
        return _farpage.parse_size(size)
    return operator.index(size)


def _sides(shape: int | Iterable[int]) -> tuple[int, ...]:
    try:
        sides: tuple[int, ...] = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        sides = tuple(operator.index(side) for side in shape)  # type: ignore[union-attr]
    if any(side < 0 for side in sides):
        raise ValueError(f"shape {sides}: no side can be negative")
    return sides


def _type_name(dtype: np.dtype[Any]) -> str:
    """What the servers remember of a type."""
    known = _NAMES.get(dtype)
    if known is not None and dtype.names is None:
        return known
    return repr(npy.dtype_to_descr(dtype))


def _shape_and_type(
    name: str, native: _farpage.Region, wanted: np.dtype[Any] | None
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Finds shape and type of a region that was opened.

    Raises `ValueError` if it is no array of the type `wanted`.
    """
    shape = tuple(native.shape) or (native.len,)
    of, element_bytes = native.dtype or ("", 1)
    if of in _NUMBERS:
        stored = _NUMBERS[of]
    elif of.startswith(_NUMPY):
        stored = npy.descr_to_dtype(ast.literal_eval(of.removeprefix(_NUMPY)))
    else:
        stored = np.dtype(f"V{element_bytes}" if native.dtype else "u1")
    if wanted is None:
        return shape, stored
    element, inner = wanted.subdtype or (wanted, ())
    if of in _NUMBERS or of.startswith(_NUMPY):
        if _type_name(element) == _type_name(stored) and shape[len(shape) - len(inner):] == inner:
            return shape, element
    elif not wanted.hasobject and wanted.itemsize > 0:
        if native.dtype and wanted.itemsize == element_bytes:
            return (*shape, *inner), element
        if not native.dtype and shape[-1] % wanted.itemsize == 0:
            return (*shape[:-1], shape[-1] // wanted.itemsize, *inner), element
    raise ValueError(
        f"`{name}` holds {shape} elements of {stored}, and is no array of {wanted}: open it without "
        "a dtype, and take a `view` of another type"
    )
