"""`RemoteArray`, and what is said about arrays.

The rule it keeps: memory is mapped as long as an array, or anything else that shows it, needs it.
All of them hold a `Pages`, by numpy's own chain of bases. A region with one is not closed: making
and closing exclude each other in the native region. What the array is called and where its pages
come from is left to `_runtime`.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from farpage import _farpage


class Mapping:
    """A region that is mapped, and what is known of it."""

    __slots__ = ("__weakref__", "dtype", "in_thread", "mode", "name", "native", "servers", "shape")

    def __init__(
        self,
        native: _farpage.Region,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        servers: tuple[str, ...],
        in_thread: bool,
        name: str | None = None,
        mode: str = "r+",
    ) -> None:
        self.native = native
        self.shape = shape
        self.dtype = dtype
        self.servers = servers
        self.in_thread = in_thread
        self.name = name
        self.mode = mode
        mappings.add(self)

    def array(self, order: Literal["C", "F"] = "C") -> RemoteArray:
        """The whole region."""
        memory = np.asarray(Pages(self))
        return np.ndarray.__new__(RemoteArray, self.shape, self.dtype, buffer=memory, order=order)


class Pages:
    """The base of an array, and of all that shows the array's memory."""

    __slots__ = ("__array_interface__", "mapping", "view")

    def __init__(self, mapping: Mapping) -> None:
        native = mapping.native
        self.mapping = mapping
        #: Keeps the region from being closed.
        self.view = native.view()
        self.__array_interface__ = {
            "version": 3,
            "data": (native.address, mapping.mode == "r"),
            "shape": (native.bytes,),
            "typestr": "|u1",
        }


T = TypeVar("T")


class Living(Generic[T]):
    """Objects as long as they live. Threads may add and list them at a time, where a `WeakSet` that
    is listed raises."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, one: T) -> None:
        self._objects[id(one)] = one

    def snapshot(self) -> list[T]:
        return [one for ref in self._objects.valuerefs() if (one := ref()) is not None]


#: All that are mapped.
mappings: Living[Mapping] = Living()

#: Arrays without a name are pickled with their contents up to this many bytes.
pickle_bytes_max = 1 << 30


class RemoteArray(np.ndarray[Any, Any]):
    """An ndarray whose pages live on memory servers and come in when they are touched.

    Made by `Runtime.zeros` and its kind, and by `Region.array`. Slices and views are arrays of this
    type that share the memory. What is computed from it, copies too, is an ordinary ndarray in local
    memory.
    """

    __slots__ = ()

    def __array_wrap__(
        self, array: Any, context: Any = None, return_scalar: bool = False
    ) -> Any:
        if array is self or type(self) is not RemoteArray:
            return array
        if return_scalar or array.ndim == 0:
            return array[()]
        return array.view(np.ndarray)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _ordinary(super().__array_function__(function, types, args, kwargs))

    def __getitem__(self, index: Any) -> Any:
        return _ordinary(super().__getitem__(index))

    @property
    def imag(self) -> Any:
        return _ordinary(super().imag)

    @imag.setter
    def imag(self, value: Any) -> None:
        self.view(np.ndarray).imag = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        pages = pages_of(self)
        if pages is None or pages.mapping.name is None:
            if pages is not None and self.nbytes > sys.modules["farpage"].pickle_bytes_max:
                raise ValueError(
                    f"an array of {self.nbytes} bytes in remote memory is not pickled by value: "
                    "create it under a name (`Runtime.create`), which is pickled instead, pickle "
                    "parts of it, or raise `farpage.pickle_bytes_max`"
                )
            return self.view(np.ndarray).__reduce_ex__(protocol)
        mapping = pages.mapping
        offset = self.__array_interface__["data"][0] - mapping.native.address
        return _open_pickled, (
            mapping.servers, mapping.name, mapping.shape, mapping.dtype,
            offset, self.shape, self.strides, self.dtype,
        )

    # `pickle` asks for the former; ndarray's own would give the contents.
    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)


def _ordinary(result: Any) -> Any:
    """Gives a result of numpy's back, as an ordinary array where it does not lie in remote memory."""
    if type(result) is RemoteArray and pages_of(result) is None:
        return result.view(np.ndarray)
    if type(result) in (list, tuple):
        return type(result)(map(_ordinary, result))
    return result


def _on_ordinary(method: Any) -> Any:
    """Makes a method of ndarray's give an ordinary array that owns its memory, or else a
    `RemoteArray` that shares the memory."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self.view(np.ndarray), *args, **kwargs)
        if type(result) is np.ndarray and pages_of(result) is not None:
            return result.view(RemoteArray)
        return result

    return call


# Methods that copy, always or at times. numpy gives a copy the type of the original.
for _name in (
    "__copy__", "__deepcopy__", "argpartition", "argsort", "astype", "byteswap", "choose", "clip",
    "compress", "conj", "conjugate", "copy", "cumprod", "cumsum", "dot", "flatten", "ravel",
    "repeat", "reshape", "round", "take",
):
    setattr(RemoteArray, _name, _on_ordinary(getattr(np.ndarray, _name)))


def _open_pickled(
    servers: tuple[str, ...],
    name: str,
    whole_shape: tuple[int, ...],
    whole_dtype: np.dtype[Any],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
) -> RemoteArray:
    """The part of a named array that was pickled: of the array as this process has it open, else
    opened for reading."""
    from farpage._runtime import opened

    whole = opened(servers, name, whole_shape, whole_dtype)
    return np.ndarray.__new__(
        RemoteArray, shape, dtype, buffer=whole.base, offset=offset, strides=strides
    )


def pages_of(array: object) -> Pages | None:
    """Whose memory an array, or a memoryview of one, shows."""
    while True:
        if isinstance(array, np.ndarray):
            array = array.base
        elif isinstance(array, memoryview):
            array = array.obj
        else:
            return array if isinstance(array, Pages) else None


def is_remote(array: np.ndarray[Any, Any]) -> bool:
    """True if an array lies in remote memory: an array of a runtime's, or a part of one, also as
    another library shows it, or one that was made in a block of `Runtime.allocate`."""
    if pages_of(array) is not None:
        return True
    address = np.asarray(array).__array_interface__["data"][0]
    return _farpage.is_allocated(address) or any(
        0 <= address - mapping.native.address < mapping.native.bytes and not mapping.native.closed
        for mapping in mappings.snapshot()
    )


def _mapping_of(array: Any) -> Mapping:
    pages = pages_of(array)
    if pages is None:
        raise ValueError(
            "this array does not lie in remote memory: arrays of `Runtime.zeros` and "
            "`Region.array` do, and slices of them; copies and results do not"
        )
    notice_handlers(pages.mapping.in_thread)
    return pages.mapping


def _spans(array: np.ndarray[Any, Any], page_bytes: int) -> Iterator[tuple[int, int]]:
    """The addresses that an array takes, as ranges. Gaps of less than a page count as taken."""
    if array.size == 0:
        return
    low = array.__array_interface__["data"][0]
    axes = []
    for side, stride in zip(array.shape, array.strides):
        if side > 1 and stride != 0:
            low += min(stride, 0) * (side - 1)
            axes.append((abs(stride), side))
    axes.sort()
    span = array.itemsize
    outer: list[tuple[int, int]] = []
    for stride, side in axes:
        if not outer and stride - span < page_bytes:
            span += stride * (side - 1)
        else:
            outer.append((stride, side))

    def at(low: int, outer: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        if not outer:
            yield low, low + span
            return
        *rest, (stride, side) = outer
        for number in range(side):
            yield from at(low + number * stride, rest)

    yield from at(low, outer)


def prefetch(array: np.ndarray[Any, Any]) -> None:
    """Brings an array's pages in and waits for them.

    Of an array that is larger than the budget the first pages may have left again. Ctrl-C ends it.

    Raises `PageError` if pages cannot be brought in, where touching them would end the program.
    """
    mapping = _mapping_of(array)
    native = mapping.native
    for low, high in _spans(array, native.page_bytes):
        native.prefetch(low - native.address, high - native.address)


def advise(array: np.ndarray[Any, Any], advice: str) -> None:
    """Says how an array will be used.

    "sequential", "random" and "normal" hold for the whole array that `array` is a part of.
    "willneed" brings its pages in while there is room, and does not wait. "dontneed" gives them
    up, written back where they changed. "zerocopy" is said before the kernel is given the array by
    a call that keeps references to memory (`socket.send` with `MSG_ZEROCOPY`, `vmsplice`): so what
    is sent is what was there, also if the array leaves or changes hands meanwhile.

    Raises `PageError` if "dontneed" could not write pages back; they are still in memory.
    """
    mapping = _mapping_of(array)
    native = mapping.native
    if advice in ("willneed", "dontneed", "zerocopy"):
        for low, high in _spans(array, native.page_bytes):
            native.advise(low - native.address, high - native.address, advice)
    else:
        native.advise(0, native.bytes, advice)


def flush(array: np.ndarray[Any, Any]) -> None:
    """Writes back all that changed in the whole array that `array` is a part of, and keeps its
    pages. An array with a name is published: who opens it from now on sees this state.

    Raises `PageError` if pages could not be written back; they are still in memory.
    """
    mapping = _mapping_of(array)
    if mapping.mode == "r":
        raise ValueError(f"`{mapping.name}` was opened for reading: open it with mode='r+'")
    mapping.native.flush()


#: The handler of SIGBUS when the first array of a runtime with in-thread faults had been made.
_own_handler: int | None = None


def notice_handlers(in_thread: bool) -> None:
    """Warns if somebody has taken SIGBUS away from the threads that serve their own faults."""
    global _own_handler
    if not in_thread:
        return
    now = _farpage.sigbus_handler()
    if _own_handler is None:
        _own_handler = now
    elif now != _own_handler:
        warnings.warn(
            "another handler of SIGBUS was installed after farpage's, which serves page faults in "
            "the threads that raise them (fault_mode='in-thread'): touching an absent page may "
            "end this program. If it was `faulthandler.enable()`, call it before the first "
            "runtime is made, or leave it to farpage; or use fault_mode='filler'",
            RuntimeWarning,
            stacklevel=4,
        )


def _at_exit(pid: int) -> None:
    """Publishes named arrays that are still open, but for those that an exception may have left
    half updated."""
    if os.getpid() != pid:
        return
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    for mapping in mappings.snapshot():
        if mapping.name is None or mapping.mode == "r" or mapping.native.closed:
            continue
        if failed:
            mapping.native.abandon()
            print(
                f"farpage: the changes to `{mapping.name}` since its last flush are not published, "
                "because the program ends with an exception",
                file=sys.stderr,
            )
            continue
        try:
            mapping.native.flush()
        except _farpage.Closed:
            pass  # By another thread, just now.
        except OSError as error:
            print(f"farpage: `{mapping.name}` is not published: {error}", file=sys.stderr)
