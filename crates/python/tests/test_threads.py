"""Threads that make arrays, open and unpickle them while others close what they are made of.

Each program ends by a signal where an array shows memory that is not mapped any more. Without the
interpreter's lock threads meet more often; with it, a small switch interval lets them.
"""

import pytest

import farpage
from conftest import run

#: Begins each program: threads that start together, and what they raised.
BEGIN = """
import os, pickle, sys, threading
import farpage, numpy as np

sys.setswitchinterval(1e-6)

def together(*bodies):
    barrier = threading.Barrier(len(bodies))
    failed = []
    def run(body):
        barrier.wait()
        try:
            body()
        except BaseException as error:
            failed.append(error)
    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]

"""


def run_threads(text, *arguments):
    program = run(BEGIN + text, *arguments)
    assert program.code == 0, (program.signal, program.err)
    return program.out.split()


def test_region_is_closed_by_one_thread_while_others_are_given_its_array(rt, name):
    given, refused = map(
        int,
        run_threads(
            """
rt = farpage.Runtime(sys.argv[1], budget="8MiB")
given, refused = [], []
for number in range(60):
    region = rt.create(f"{sys.argv[2]}-{number}", (3000,), "i4")
    def give():
        try:
            array = region.array()
        except ValueError:
            return
        array[::1000] += 1
        given.append(int(array[0]))
    def close():
        try:
            region.close()
        except BufferError:
            refused.append(number)
    together(give, close, give, give)
    region.close()
    rt.remove(region.name)
print(len(given), len(refused))
""",
            rt.servers[0],
            name,
        ),
    )
    print(given, "arrays were given,", refused, "calls of close refused")


def test_runtime_is_closed_by_one_thread_while_others_make_arrays(rt, name):
    run_threads(
        """
for number in range(12):
    rt = farpage.Runtime(sys.argv[1], budget="8MiB")
    kept = rt.create(f"{sys.argv[2]}-{number}", (3000,), "i4")
    arrays = []
    def make():
        try:
            for _ in range(10):
                array = rt.zeros((3000,), "i4")
                array += 1
                arrays.append(array)
        except ValueError as error:
            assert "closed" in str(error), error
    def give():
        try:
            for _ in range(10):
                arrays.append(kept.array())
                arrays[-1][:] = 1
        except ValueError as error:
            assert "closed" in str(error), error
    def close():
        try:
            rt.close()
        except BufferError:
            pass
    together(make, close, give, make)
    assert all(array.sum() == 3000 for array in arrays)
    arrays.clear()
    rt.close()
    assert kept.closed
""",
        rt.servers[0],
        name,
    )


def test_runtime_is_not_closed_before_an_array_that_is_being_made():
    """The server is stopped in the middle. It must not be ended then: the array needs it."""
    run_threads(
        """
import signal
rt = farpage.local(budget="8MiB", capacity="64MiB", url="tcp://127.0.0.1:0", deadline=10)
server = rt._server.process.pid
os.kill(server, signal.SIGSTOP)
arrays = []
def make():
    try:
        arrays.append(rt.zeros((4 << 20,), "f4"))
    except ValueError as error:
        assert "closed" in str(error), error
def close():
    try:
        rt.close()
    except BufferError:
        pass
threads = []
for body in (make, close):
    thread = threading.Thread(target=body)
    thread.start()
    threads.append(thread)
    # Until it waits for the server, or for the other thread.
    while open(f"/proc/self/task/{thread.native_id}/stat").read().rpartition(") ")[2][0] != "S":
        pass
os.kill(server, signal.SIGCONT)
for thread in threads:
    thread.join()
for array in arrays:
    array[:] = np.arange(array.size)
    assert np.array_equal(array, np.arange(array.size, dtype="f4"))
""",
    )


def test_array_is_unpickled_by_threads_while_its_region_is_closed(rt, name):
    with rt.create(name, (3000,), "i4") as region:
        region.array()[:] = 1
    run_threads(
        """
rt = farpage.Runtime(sys.argv[1], budget="8MiB")
def opened():
    return rt.open(sys.argv[2])
sent = pickle.dumps(opened().array())
def unpickle():
    for _ in range(60):
        assert pickle.loads(sent).sum() == 3000
def close():
    for _ in range(60):
        region = opened()
        try:
            region.close()
        except BufferError:
            pass  # Another thread was given it.
def make():
    for _ in range(60):
        rt.zeros((10,))
together(unpickle, close, make, unpickle)
""",
        rt.servers[0],
        name,
    )


def test_runtime_is_closed_by_one_thread_while_another_allocates(rt):
    run_threads(
        """
for number in range(4):
    rt = farpage.Runtime(sys.argv[1], budget="8MiB")
    block = rt.allocate(min_bytes="64KiB")
    arrays = []
    def allocate():
        try:
            block.__enter__()
        except ValueError as error:
            assert "closed" in str(error), error
            return
        for _ in range(20):
            array = np.full(20000, 7)
            assert array.sum() == 140000
        block.__exit__()
        arrays.append(array)
    def close():
        try:
            rt.close()
        except BufferError:
            pass
    together(allocate, close)
    assert all(array.sum() == 140000 for array in arrays)
    arrays.clear()
    rt.close()
""",
        rt.servers[0],
    )
