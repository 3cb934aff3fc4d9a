"""Arrays without a name: what numpy does with them, how long they live, how they are pickled."""

import copy
import gc
import pickle
import sys
import tempfile

import numpy as np
import pytest

import farpage
from conftest import MIB, is_running, run, wait_until


def test_array_four_times_the_budget_equals_a_local_one(rt):
    a = rt.zeros((4 * MIB,), "f8")
    assert a.nbytes == 4 * 8 * MIB
    expected = np.zeros(a.shape)
    for x in (a, expected):
        x += np.arange(x.size)
        x[::3] *= 2
        x.sort()
    assert np.array_equal(a, expected)
    assert a.sum() == expected.sum()
    stats = rt.stats()
    assert stats.evictions > 0 and stats.fills > 0
    assert stats.peak_resident_bytes <= stats.budget_bytes == 8 * MIB
    assert "evictions" in str(stats)


@pytest.mark.parametrize(
    "dtype",
    ["f4", "i8", "u1", "?", "c16", ">i4", "M8[ns]", "U5", [("a", "f4"), ("b", "i2", (3,))]],
    ids=lambda dtype: "fields" if isinstance(dtype, list) else dtype,
)
def test_array_has_the_type_and_shape_that_were_asked_for(rt, dtype):
    a = rt.zeros((3, 5), dtype)
    plain = np.zeros((3, 5), dtype)
    assert isinstance(a, np.ndarray) and isinstance(a, farpage.RemoteArray)
    assert a.dtype == plain.dtype and a.shape == plain.shape and a.strides == plain.strides
    assert a.flags.c_contiguous and a.flags.aligned and a.flags.writeable
    assert a.tobytes() == plain.tobytes()


def test_shapes_are_as_in_numpy(rt):
    for shape in [7, (2, 3), (), (0, 4), [5], np.int64(6)]:
        a, plain = rt.zeros(shape, "i4"), np.zeros(shape, "i4")
        assert a.shape == plain.shape and a.size == plain.size
    assert rt.zeros(3, ("f4", 2)).shape == (3, 2)
    with pytest.raises(ValueError, match="negative"):
        rt.zeros((2, -1))
    with pytest.raises(ValueError, match="address space"):
        rt.zeros((1 << 40, 1 << 40))


def test_arrays_are_made_as_numpy_makes_them(rt):
    for order in ("C", "F"):
        for dtype in ("f8", "i2", "U3", "?", [("a", "f4"), ("b", "i4")]):
            a, plain = rt.ones((3, 5), dtype, order), np.ones((3, 5), dtype, order)
            assert a.dtype == plain.dtype and a.strides == plain.strides
            assert type(a) is farpage.RemoteArray and np.array_equal(a, plain)
        for made in (rt.zeros, rt.empty):
            a = made((3, 5), "i4", order, codec="lz4", page_size="4KiB")
            assert a.strides == np.zeros((3, 5), "i4", order).strides and not a.any()
    for value in (7, 2.5, True, 1j, "text", np.float32(3), np.datetime64(1, "s"), [1, 2, 3]):
        a, plain = rt.full((2, 3), value), np.full((2, 3), value)
        assert a.dtype == plain.dtype and np.array_equal(a, plain)
    assert rt.full(3, 2.7, "i4").tolist() == [2, 2, 2] and rt.full((), 5).item() == 5
    with pytest.raises(ValueError, match="'C' or 'F'"):
        rt.zeros(3, order="K")
    with pytest.raises(TypeError, match="references to Python objects"):
        rt.full(3, None)
    a = rt.ones((300, 500), order="F", codec="zfp:accuracy=1e-6")
    farpage.advise(a, "dontneed")
    assert (a == 1).all()


def test_package_says_its_version():
    assert farpage.__version__.split(".")[0].isdigit()


def test_what_makes_no_sense_is_refused_with_words(rt):
    with pytest.raises(TypeError, match="references to Python objects"):
        rt.zeros(3, object)
    with pytest.raises(ValueError, match="U16"):
        rt.zeros(3, "U")
    with pytest.raises(ValueError, match="power of two"):
        rt.zeros(3, page_size="3KiB")
    with pytest.raises(ValueError, match="is no size"):
        rt.zeros(3, page_size="many")
    with pytest.raises(ValueError, match="element|zfp|ZFP"):
        rt.zeros(300, "?", codec="zfp:accuracy=1e-6")
    with pytest.raises(farpage.Error, match="memory|bytes|lend|room"):
        rt.zeros((1 << 34,), "f8")
    with pytest.raises(ValueError, match="budget"):
        farpage.local(budget="1000TiB")
    with pytest.raises(ValueError, match="filler"):
        farpage.local(fault_mode="fast")
    with pytest.raises(ConnectionError, match="nobody-listens"):
        farpage.Runtime("shm:///tmp/nobody-listens", deadline=0.2)
    with pytest.raises(farpage.Error, match="did not start"):
        farpage.local(url="shm:///no/such/folder/socket")


@pytest.mark.parametrize("separator", [",", ", "])
def test_servers_may_be_a_list_or_a_text_with_commas(separator):
    with farpage.local(capacity="64MiB") as one, farpage.local(capacity="64MiB") as other:
        urls = [one.servers[0], other.servers[0]]
        for given in (urls, tuple(urls), separator.join(urls), separator.join(urls) + ","):
            with farpage.Runtime(given, budget="8MiB") as rt:
                assert list(rt.servers) == urls
    for text in ("", ","):
        with pytest.raises(ValueError, match="not an endpoint"):
            farpage.Runtime(text)


def test_own_server_listens_where_a_folder_has_a_comma(tmp_path, monkeypatch):
    folder = tmp_path / "a,b"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with farpage.local(capacity="64MiB") as rt:
        assert str(folder) in rt.servers[0]


def test_lack_of_memory_is_a_memory_error_in_words_of_python(name):
    with farpage.local(budget="8MiB", capacity="64MiB") as small:
        for call in (
            lambda: small.zeros((16 << 20,)),
            lambda: small.create(name, (6 << 20,)),
            lambda: small.allocate(capacity="1GiB"),
            lambda: small.zeros((1 << 45,)),
        ):
            with pytest.raises(MemoryError) as error:
                call()
            assert isinstance(error.value, farpage.CapacityError)
            assert isinstance(error.value, farpage.Error) and isinstance(error.value, OSError)
            assert "Reserve::" not in str(error.value), error.value
        with pytest.raises(MemoryError, match="keeps two versions.*capacity="):
            small.create(name, (6 << 20,))
        small.zeros((4 << 20,))


def test_codec_and_page_size_are_used(rt):
    a = rt.zeros((MIB,), "f8", codec="lz4", page_size="16KiB")
    a[:] = np.arange(MIB) // 100
    farpage.flush(a)
    assert rt.stats().compression_ratio > 2
    assert farpage._arrays.pages_of(a).mapping.native.page_bytes == 16 << 10


def test_slices_share_memory_and_results_are_local(rt):
    a = rt.zeros((10, 10))
    part = a[2:5, ::2]
    part[:] = 1
    assert a.sum() == 15
    assert type(part) is farpage.RemoteArray and np.shares_memory(a, part)
    assert type(a.T) is farpage.RemoteArray
    for result in (a + 1, np.sqrt(a), a[a > 0], a[[1, 2]], np.asarray(a.copy())):
        assert type(result) is np.ndarray
        assert farpage._arrays.pages_of(result) is None
    assert isinstance(a.sum(), np.float64) and isinstance(a[0, 0], np.float64)
    a += 1
    assert type(a) is farpage.RemoteArray and a[0, 0] == 1


#: Arguments of ndarray's methods that need some.
ARGUMENTS = {
    "argpartition": (1,),
    "astype": ("f4",),
    "choose": ([np.arange(16.0)] * 16,),
    "clip": (1, 2),
    "compress": ([True, False],),
    "dot": (np.ones((4, 2)),),
    "getfield": ("f4",),
    "repeat": (2,),
    "reshape": (-1,),
    "searchsorted": (2,),
    "swapaxes": (0, 1),
    "take": ([0, 1],),
    "to_device": ("cpu",),
    "view": ("i8",),
    "__deepcopy__": ({},),
}
#: Members that change or write the array, or are what it is a view of.
OTHERS = "base dump fill itemset newbyteorder partition put resize setfield setflags sort tofile".split()


def test_results_of_all_methods_are_ordinary_arrays_unless_they_share_the_memory(rt):
    whole = rt.zeros((8, 16), "f8")
    whole[:] = np.arange(128).reshape(8, 16)
    methods = [it for it in dir(np.ndarray) if not it.startswith("_")] + ["__copy__", "__deepcopy__"]
    checked = 0
    # The second is no contiguous one, so that `reshape` copies.
    for a in (whole[:4, :4], whole[::2, ::4].T, whole[0], whole.view("c16")[:4, :4]):
        for name in methods:
            if name in OTHERS:
                continue
            try:
                member = getattr(a, name)
                result = member(*ARGUMENTS.get(name, ())) if callable(member) else member
                plain = getattr(np.asarray(a), name)
                expected = plain(*ARGUMENTS.get(name, ())) if callable(plain) else plain
            except (AttributeError, DeprecationWarning, TypeError, ValueError):
                continue  # Not with a type or shape like this.
            if not isinstance(result, np.ndarray):
                continue
            checked += 1
            is_remote = farpage._arrays.pages_of(result) is not None
            assert (type(result) is farpage.RemoteArray) == is_remote, name
            assert is_remote == np.shares_memory(result, whole), name
            assert np.array_equal(result, expected), name
    assert checked > 60


def test_results_of_functions_are_ordinary_arrays_unless_they_share_the_memory(rt):
    a = rt.zeros((8, 16), "f8")
    a[:] = np.arange(128).reshape(8, 16)[::-1]
    plain = np.array(a)
    for function in (
        np.sort, np.argsort, np.copy, np.empty_like, np.zeros_like, np.ones_like, np.unique,
        np.cumsum, np.diff, np.nan_to_num, np.median, np.imag, np.fix, np.triu, np.gradient,
        np.nonzero, np.ediff1d, np.ravel, np.transpose, np.flip, np.atleast_3d, np.squeeze,
        lambda x: np.partition(x, 3), lambda x: np.roll(x, 1), lambda x: np.repeat(x, 2),
        lambda x: np.tile(x, 2), lambda x: np.insert(x, 1, 2), lambda x: np.split(x, 2),
        lambda x: np.take_along_axis(x, np.argsort(x, 0), 0), lambda x: np.full_like(x, 7),
    ):
        result, expected = function(a), function(plain)
        several = isinstance(result, (list, tuple))
        assert type(result) is type(expected) or not several
        for one, other in zip(*([result, expected] if several else [[result], [expected]])):
            shares = np.shares_memory(one, a)
            assert isinstance(one, farpage.RemoteArray) == shares, function
            assert farpage.is_remote(one) == shares
            assert function is np.empty_like or np.array_equal(one, other), function
    c = a.view("c16")
    c.imag = 5
    c.imag[:, 0] += 1
    assert (a[:, 1::2] == [6] + [5] * 7).all()
    ordinary = np.sort(a)
    ordinary.resize(3)
    assert a.copy().flags.owndata and a.astype("f4").flags.owndata


def test_is_remote_tells_where_an_array_lies(rt, name):
    a = rt.zeros((100, 100), "f4")
    assert farpage.is_remote(a) and farpage.is_remote(a[3:, ::2].T)
    assert farpage.is_remote(np.from_dlpack(a)) and farpage.is_remote(np.asarray(a))
    assert farpage.is_remote(np.frombuffer(memoryview(a), "f4")) and farpage.is_remote(rt.zeros((0, 3)))
    assert not farpage.is_remote(a + 1) and not farpage.is_remote(np.zeros(100))
    assert not farpage.is_remote(np.array(a, subok=True)) and not farpage.is_remote([1, 2])
    assert farpage.is_remote(rt.create(name, (10,)).array())


def test_other_libraries_see_the_same_addresses(rt):
    a = rt.zeros((1000,), "f4")
    address = a.__array_interface__["data"][0]
    assert np.from_dlpack(a).__array_interface__["data"][0] == address
    assert np.frombuffer(memoryview(a), "f4").__array_interface__["data"][0] == address
    try:
        import pyarrow
    except ImportError:
        return
    assert pyarrow.Array.from_buffers(
        pyarrow.float32(), 1000, [None, pyarrow.py_buffer(a)]
    ).buffers()[1].address == address


def test_memory_stays_as_long_as_anything_shows_it(rt):
    a = rt.zeros((1000,), "i4")
    a[:] = 7
    view = memoryview(a)[10:20]
    tensor = np.from_dlpack(a[20:30])
    del a
    gc.collect()
    assert view[3] == 7 and tensor[3] == 7
    with pytest.raises(BufferError, match="1 arrays"):
        rt.close()
    view.release()
    with pytest.raises(BufferError):
        rt.close()
    del tensor
    rt.close()
    with pytest.raises(ValueError, match="closed"):
        rt.zeros(3)


def test_error_of_close_says_how_a_notebook_lets_go_of_arrays(rt, monkeypatch):
    a = rt.zeros((1000,))
    with pytest.raises(BufferError) as error:
        rt.close()
    assert "xdel" not in str(error.value)
    monkeypatch.setitem(sys.modules, "IPython", sys)
    with pytest.raises(BufferError, match="%xdel a"):
        rt.close()
    del a, error


def test_memory_goes_with_the_last_array(rt):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)

    rt.zeros((MIB,))
    before = mapped()
    for _ in range(100):
        a = rt.zeros((4 * MIB,), "f4")
        a[:: 64 << 10] = 1
    assert mapped() < before + 50
    del a
    wait_until("all pages are given back", lambda: rt.stats().resident_bytes == 0)


def test_array_outlives_its_runtime_and_its_server_outlives_both():
    rt = farpage.local(budget="8MiB", capacity="64MiB")
    pid = rt._server.process.pid
    a = rt.zeros((4 * MIB,), "f4")
    del rt
    gc.collect()
    a[:] = np.arange(a.size)
    assert np.array_equal(a[::1000], np.arange(a.size, dtype="f4")[::1000])
    assert is_running(pid)
    del a
    gc.collect()
    assert not is_running(pid)


def test_pickling_by_value_has_a_limit(rt, monkeypatch):
    a = rt.zeros((4, 1000))
    a[:] = np.arange(1000)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(a[1:], protocol))
        assert type(back) is np.ndarray and np.array_equal(back, a[1:])
    assert np.array_equal(copy.deepcopy(a), a)
    monkeypatch.setattr(farpage, "pickle_bytes_max", 1000)
    with pytest.raises(ValueError, match="pickle_bytes_max"):
        pickle.dumps(a)
    pickle.dumps(a[0, :10])


def test_prefetch_brings_in_what_it_is_given(rt):
    a = rt.zeros((64, 16384), "f4")
    a[:] = np.arange(16384)
    farpage.advise(a, "dontneed")
    native = farpage._arrays.pages_of(a).mapping.native
    assert native.resident_pages() == 0

    def resident(pages):
        # A page that is being mapped may not be counted yet.
        wait_until(f"{pages} pages are there", lambda: native.resident_pages() == pages)

    farpage.prefetch(a[3])
    resident(1)
    farpage.prefetch(a[8:16, :10])
    resident(9)
    farpage.prefetch(a[20::-1, ::-1][:2])
    resident(11)
    farpage.prefetch(a[:0])
    farpage.advise(a[3], "dontneed")
    resident(10)
    farpage.advise(a[40:41], "willneed")
    resident(11)
    assert a[3].sum() == a[8].sum()
    for advice in ("sequential", "random", "normal", "zerocopy"):
        farpage.advise(a, advice)
    with pytest.raises(ValueError, match="sequential"):
        farpage.advise(a, "often")
    for call in (farpage.prefetch, farpage.flush):
        with pytest.raises(ValueError, match="does not lie in remote memory"):
            call(np.zeros(3))
        with pytest.raises(ValueError, match="does not lie in remote memory"):
            call(a + 1)


def test_files_are_read_into_arrays_and_written_from_them(rt, tmp_path):
    a = rt.zeros((4 * MIB,), "f4")
    a[:] = np.arange(a.size)
    a.tofile(tmp_path / "a")
    b = rt.zeros((4 * MIB,), "f4")
    with open(tmp_path / "a", "rb", buffering=0) as file:
        assert file.readinto(memoryview(b).cast("B")) == b.nbytes
    assert np.array_equal(a, b)


def test_environment_says_what_is_not_given():
    with farpage.local(capacity="64MiB") as server:
        with_environment = {
            "FARPAGE_SERVER": server.servers[0],
            "FARPAGE_BUDGET": "16MiB",
            "FARPAGE_PAGE_SIZE": "8KiB",
        }
        program = run(
            """
            import farpage
            rt = farpage.Runtime()
            a = rt.zeros((1 << 20,))
            a[:] = 3
            print(rt.servers[0], rt.stats().budget_bytes, farpage._arrays.pages_of(a).mapping.native.page_bytes)
            """,
            environment=with_environment,
        )
        assert program.out.split() == [server.servers[0], str(16 * MIB), "8192"], program.err


def test_in_thread_faults_and_a_handler_that_takes_them_away():
    program = run(
        """
        import faulthandler, sys, warnings
        import farpage, numpy as np
        rt = farpage.local(budget="8MiB", capacity="64MiB", fault_mode="in-thread", page_size="4KiB")
        a = rt.zeros((4 << 20,), "f4")
        a[:] = np.arange(a.size)
        assert np.array_equal(a, np.arange(a.size, dtype="f4"))
        warnings.simplefilter("error")
        farpage.prefetch(a[:10])
        faulthandler.disable(), faulthandler.enable()
        try:
            farpage.prefetch(a[:10])
        except RuntimeWarning as warning:
            assert "faulthandler" in str(warning)
            print("noticed")
        sys.stdout.flush()
        import os; os._exit(0)
        """
    )
    assert program.out == "noticed\n", (program.signal, program.err)
