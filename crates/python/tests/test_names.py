"""Named arrays: create, open, close, publish, and who may have them."""

import gc
import pickle
import subprocess
import sys

import numpy as np
import pytest

import farpage
from conftest import run


def test_named_array_comes_back_with_its_type_and_shape(rt, name):
    for number, dtype in enumerate(
        ["f8", "u2", "?", "c8", ">f4", "f2", "m8[s]", "S7", [("x", "<f4"), ("y", "<i8", (2,))]]
    ):
        own = f"{name}-{number}"
        with rt.create(own, (3, 50), dtype) as region:
            values = np.arange(150).reshape(3, 50)
            if np.dtype(dtype).names:
                region.array()["x"] = values
            else:
                region.array()[:] = values.astype(dtype)
            expected = region.array().copy()
        assert region.closed
        with rt.open(own) as region:
            a = region.array()
            assert a.dtype == np.dtype(dtype) and a.shape == (3, 50)
            assert a.tobytes() == expected.tobytes()
            del a
    assert sum(it.startswith(name) for it in rt.names()) == 9
    rt.remove(f"{name}-0")
    assert f"{name}-0" not in rt.names()
    with pytest.raises(FileNotFoundError, match=name):
        rt.open(f"{name}-0")
    with pytest.raises(FileNotFoundError, match=name):
        rt.remove(f"{name}-0")


def test_program_in_another_process_opens_what_was_published(rt, name):
    with rt.create(name, (4096, 1024), "f8", codec="adaptive") as region:
        region.array()[:] = 1
    program = run(
        """
        import sys, farpage
        with farpage.Runtime(sys.argv[1], budget="8MiB") as rt:
            with rt.open(sys.argv[2], "r+") as region:
                a = region.array()
                print(a.shape, a.dtype, a.sum())
                a[0] = 2
                del a
        """,
        rt.servers[0],
        name,
    )
    assert program.out == "(4096, 1024) float64 4194304.0\n", program.err
    assert rt.open(name).array()[:2, 0].tolist() == [2, 1]


def test_region_with_arrays_is_not_closed(rt, name):
    region = rt.create(name, (1000,), "f4")
    a = region.array()[10:]
    for close in (region.close, rt.close):
        with pytest.raises(BufferError, match="delete them"):
            close()
    a[:] = 1
    with pytest.raises(BufferError):
        with region:
            pass
    assert not region.closed
    del a
    region.close()
    region.close()
    with pytest.raises(ValueError, match="closed"):
        region.array()


def test_opened_to_be_read_changes_nothing(rt, name):
    with rt.create(name, (1000,), "f4") as region:
        region.array()[:] = 1
    w = rt.open(name, mode="r").array()
    gc.collect()
    assert not w.flags.writeable and w.sum() == 1000
    with pytest.raises(ValueError, match="read-only"):
        w[0] = 1
    with pytest.raises(ValueError):
        w.flags.writeable = True
    with pytest.raises(ValueError, match="r\\+"):
        farpage.flush(w)
    farpage.prefetch(w)
    farpage.advise(w, "dontneed")
    del w
    with pytest.raises(ValueError, match="need 'r'"):
        rt.open(name, mode="w")


def test_name_is_open_once_to_be_changed(rt, name):
    with rt.create(name, (1000,), "f4") as region:
        with pytest.raises(FileNotFoundError, match=name):
            rt.open(name)
        with pytest.raises(farpage.InUseError, match=name):
            rt.open(name, "r+")
        with pytest.raises(farpage.InUseError, match=name):
            rt.create(name, (1000,), "f4", replace=True)
        with pytest.raises(farpage.InUseError, match=name):
            rt.remove(name)
    with pytest.raises(FileExistsError, match=name):
        rt.create(name, (1000,), "f4")
    with rt.create(name, (500,), "i4", replace=True) as region:
        region.array()[:] = 3
    with rt.open(name) as region:
        assert region.array().sum() == 1500


READER = """
import pickle, sys, farpage
rt = farpage.Runtime(sys.argv[1], budget="4MiB")
a = rt.open(sys.argv[2]).array()
b = pickle.loads(bytes.fromhex(sys.argv[3]))
print("reads", int(a[0]), flush=True)
sys.stdin.read()
assert not a.flags.writeable
assert (a == a[0]).all() and (b == a[0]).all()
print("read", int(a[-1]))
"""


def test_many_programs_read_beside_one_that_writes(rt, name):
    region = rt.create(name, (1 << 20,), "f4")
    a = region.array()
    readers = []
    for version in range(1, 4):
        a[:] = version
        region.flush()
        sent = pickle.dumps(a[100:200]).hex()
        for _ in range(2):
            command = [sys.executable, "-c", READER, rt.servers[0], name, sent]
            pipe = subprocess.PIPE
            reader = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            readers.append((version, reader))
            assert reader.stdout.readline() == f"reads {version}\n"
    old = rt.open(name)
    a[:] = 9
    region.flush()
    for version, reader in readers:
        out, _ = reader.communicate(timeout=60)
        assert (out, reader.returncode) == (f"read {version}\n", 0)
    # In the program that writes, too, and until it is closed there.
    assert old.array()[5] == 3 and rt.open(name).array()[5] == 9
    del a
    region.close()
    rt.remove(name)
    assert old.array().sum() == 3 << 20
    with pytest.raises(FileNotFoundError, match=name):
        rt.open(name)


def test_block_that_ends_by_an_exception_publishes_nothing(rt, name):
    with rt.create(name, (1000,), "f4") as region:
        region.array()[:] = 1
    with pytest.raises(ZeroDivisionError):
        with rt.open(name, "r+") as region:
            a = region.array()
            a[:] = 2
            1 / 0
    del a, region
    gc.collect()
    with rt.open(name, "r+") as region:
        assert region.array().sum() == 1000
        region.array()[:] = 3
        region.flush()
        region.array()[:] = 4
    with pytest.raises(ZeroDivisionError):
        with rt.open(name, "r+") as region:
            region.array()[:] = 5
            region.flush()
            region.array()[:] = 6
            1 / 0
    with rt.open(name) as region:
        assert region.array()[0] == 5


def test_exception_in_a_block_is_not_hidden_by_what_is_closed(rt, name):
    with pytest.raises(ZeroDivisionError):
        with farpage.Runtime(rt.servers, budget="8MiB") as other:
            region = other.create(name, (1000,), "f4")
            region.array()[:] = 1
            region.close()
            1 / 0
    with pytest.raises(ZeroDivisionError):
        with rt.open(name, "r+") as region:
            assert region.array().sum() == 1000
            region.close()
            1 / 0
    with pytest.raises(ZeroDivisionError):
        with rt:
            rt.close()
            1 / 0


def test_array_that_nobody_holds_any_more_is_published(rt, name):
    rt.create(name, (1000,), "f4").array()[:] = 7
    gc.collect()
    assert rt.open(name).array().sum() == 7000


@pytest.mark.parametrize(
    "stored, others",
    [
        ("f8", ["f4", "i8", ">f8", "c16", "u1", "V8", "O"]),
        ("f4", ["i4", ">f4", "u1"]),
        ("M8[s]", ["M8[ns]", "i8"]),
        ([("a", "f4"), ("b", "i4")], [[("a", "i4"), ("b", "f4")], [("b", "f4"), ("a", "i4")], "V8"]),
        ("V8", ["f8"]),
    ],
    ids=lambda it: "" if isinstance(it, list) else it,
)
def test_array_is_opened_with_no_other_type_than_its_own(rt, name, stored, others):
    with rt.create(name, (10, 4), stored) as region:
        region.array().view("u1")[:] = 1
    for mode in ("r", "r+"):
        for other in others:
            with pytest.raises(ValueError, match="is no array of"):
                rt.open(name, mode, dtype=other)
        with rt.open(name, mode, dtype=stored) as region:
            a = region.array()
            assert a.dtype == np.dtype(stored) and a.shape == (10, 4)
            assert (a.view("u1") == 1).all()
            del a


def test_type_that_numpy_gives_dimensions_is_opened_as_it_was_created(rt, name):
    with rt.create(name, 3, ("f4", 2)) as region:
        assert region.array().shape == (3, 2)
    assert rt.open(name, dtype=("f4", 2)).array().shape == (3, 2)
    with pytest.raises(ValueError, match="is no array of"):
        rt.open(name, dtype=("f4", 3))
    aligned = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    with rt.create(f"{name}-aligned", 3, aligned) as region:
        sent = pickle.dumps(region.array())
    assert rt.open(f"{name}-aligned", dtype=aligned).array().dtype == aligned
    assert pickle.loads(sent).dtype == aligned


@pytest.mark.parametrize(
    "of, wanted, expected",
    [
        (None, None, ((80,), "u1")),
        (None, "f8", ((10,), "f8")),
        (None, ("f4", 2), ((10, 2), "f4")),
        (None, "S3", None),
        (None, "O", None),
        (("", 16), None, ((5,), "V16")),
        (("", 16), "c16", ((5,), "c16")),
        (("", 16), "f8", None),
        (("", 16), ("f8", 2), ((5, 2), "f8")),
    ],
)
def test_what_has_no_type_of_numpys_is_opened_with_one_that_fits(of, wanted, expected):
    class Opened:
        shape = []
        dtype = of
        len = 80 // (of[1] if of else 1)

    def found():
        return farpage._runtime._shape_and_type("x", Opened, wanted and np.dtype(wanted))

    if expected is None:
        with pytest.raises(ValueError, match="is no array of"):
            found()
    else:
        assert found() == (expected[0], np.dtype(expected[1]))


@pytest.mark.parametrize("dtype", ["u1", "f8"])
def test_array_without_elements_keeps_its_shape(rt, name, dtype):
    with rt.create(name, (0, 4), dtype) as region:
        sent = pickle.dumps(region.array())
    assert rt.open(name).array().shape == (0, 4)
    assert pickle.loads(sent).shape == (0, 4)


def test_pickled_name_that_was_replaced_by_another_type_or_shape_is_refused(rt, name):
    with rt.create(name, (8, 16), "f8") as region:
        region.array()[:] = 1
        sent = pickle.dumps(region.array()[2:])
    for shape, dtype in [((8, 16), "f4"), ((8, 16), "i8"), ((16, 8), "f8"), ((9, 16), "f8")]:
        with rt.create(name, shape, dtype, replace=True) as region:
            with_it_open = region.array()
            with_it_open[:] = 2
            farpage.flush(with_it_open)
            with pytest.raises(ValueError, match=name):
                pickle.loads(sent)
            del with_it_open
        with pytest.raises(ValueError, match=name):
            pickle.loads(sent)
    with rt.create(name, (8, 16), "f8", replace=True) as region:
        region.array()[:] = 3
    assert pickle.loads(sent).sum() == 3 * 6 * 16


def test_pickled_name_is_the_same_memory_in_this_process(rt, name):
    with rt.create(name, (100, 100), "f4") as region:
        a = region.array()
        b = pickle.loads(pickle.dumps(a[10:20, ::-2]))
        assert np.shares_memory(a, b) and b.shape == (10, 50)
        b[:] = 1
        assert a.sum() == 500 and a[10, 99] == 1 and a[10, 98] == 0
        del a, b
    # With the runtime that is there.
    w = rt.open(name).array()
    sent = pickle.dumps(w[10])
    del w
    assert pickle.loads(sent).sum() == 50


def test_pickled_name_is_opened_although_the_runtime_was_closed_or_is_the_parents(rt, name):
    program = run(
        """
        import os, pickle, signal, sys, farpage
        rt = farpage.Runtime(sys.argv[1], budget="8MiB")
        with rt.create(sys.argv[2], (1000,), "f4") as region:
            region.array()[:] = 1
            sent = pickle.dumps(region.array())
        region = rt.open(sys.argv[2])
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if pickle.loads(sent).sum() == 1000 else 1)
        assert os.waitpid(child, 0)[1] == 0
        rt.close()
        print(region.closed, pickle.loads(sent).sum())
        """,
        rt.servers[0],
        name,
    )
    assert program.out == "True 1000.0\n", (program.signal, program.err)
