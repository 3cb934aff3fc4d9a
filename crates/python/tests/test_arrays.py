"""Arrays without a name: what numpy does with them, how long they live, how they are pickled."""

import copy
import gc
import pickle
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
    with pytest.raises(ValueError, match="name each server by itself"):
        farpage.Runtime(["tcp://127.0.0.1:1,tcp://127.0.0.1:2"])
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
    for advice in ("sequential", "random", "normal"):
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
