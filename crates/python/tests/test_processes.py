"""Ends of processes: of the server, of the program, of children; and signals."""

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import farpage
from conftest import is_running, run, wait_until

#: Long enough for a server that lives on a busy machine.
DEADLINE_S = 5
#: For a machine that is busy with other things.
MARGIN_S = 20


def test_server_ends_with_its_runtime():
    with farpage.local(budget="8MiB", capacity="64MiB") as rt:
        pid = rt._server.process.pid
        path = rt.servers[0].removeprefix("shm://")
        assert is_running(pid) and os.path.exists(path)
    assert not is_running(pid) and not os.path.exists(path)


@pytest.mark.parametrize(
    "end, code",
    [("pass", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", -9)],
    ids=["orderly", "exit", "exception", "killed"],
)
def test_server_ends_with_the_program_however_that_ends(end, code):
    program = run(
        f"""
        import os, sys, farpage
        rt = farpage.local(budget="8MiB", capacity="64MiB")
        a = rt.zeros((1 << 20,), "f4")
        a[:] = 1
        print(rt._server.process.pid, rt.servers[0], flush=True)
        {end}
        """
    )
    pid, url = program.out.split()
    wait_until("the server has ended", lambda: not is_running(int(pid)))
    wait_until("its socket is gone", lambda: not os.path.exists(url.removeprefix("shm://")))
    assert program.code == code, program.err


def test_server_ends_although_a_child_holds_its_pipe():
    program = run(
        """
        import os, time, farpage
        rt = farpage.local(budget="8MiB", capacity="64MiB")
        child = os.fork()
        if child == 0:
            os.close(0), os.close(1), os.close(2)
            time.sleep(60)
            os._exit(0)
        print(child, rt._server.process.pid, flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    child, pid = map(int, program.out.split())
    try:
        wait_until("the server has ended", lambda: not is_running(pid))
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_ctrl_c_is_not_for_the_server(rt):
    assert os.getsid(rt._server.process.pid) == rt._server.process.pid


def test_killed_server_ends_a_ufunc_within_the_deadline_and_the_array_is_named():
    program = run(
        f"""
        import os, sys, time, farpage, numpy as np
        rt = farpage.local(
            budget="16MiB", capacity="256MiB", url="tcp://127.0.0.1:0", deadline={DEADLINE_S}
        )
        # With room for all of it, nobody waits for an eviction, which may fail first.
        weights = rt.create(f"weights-{{os.getpid()}}", (1 << 20,), "f4").array()
        weights[:] = np.arange(weights.size)
        result = np.empty_like(weights)
        farpage.advise(weights, "dontneed")
        os.kill(rt._server.process.pid, 9)
        print(rt.servers[0], time.time(), flush=True)
        def in_this_function():
            np.add(weights, 1, out=result)
        in_this_function()
        print("not reached")
        """
    )
    ended = time.time()
    url, killed = program.out.split()
    assert program.signal == "SIGBUS", program.err
    assert ended - float(killed) < DEADLINE_S + MARGIN_S
    assert "array `weights-" in program.err and url in program.err, program.err
    assert "Fatal Python error: Bus error" in program.err
    assert "in in_this_function" in program.err


def test_killed_server_is_an_error_of_prefetch_and_flush():
    rt = farpage.local(
        budget="16MiB", capacity="256MiB", url="tcp://127.0.0.1:0", deadline=DEADLINE_S
    )
    # With room for both, nobody waits for an eviction, which may fail first.
    a, b = rt.zeros((1 << 20,), "f4"), rt.zeros((1 << 16,), "f4")
    a[:] = np.arange(a.size)
    farpage.advise(a, "dontneed")
    b[:] = np.arange(b.size)
    server = rt._server.process
    server.kill()
    server.wait()
    for call, array in ((farpage.flush, b), (farpage.prefetch, a)):
        begun = time.monotonic()
        with pytest.raises(farpage.PageError, match="array") as error:
            call(array)
        assert time.monotonic() - begun < DEADLINE_S + MARGIN_S
        assert isinstance(error.value, OSError) and isinstance(error.value, farpage.Error)
        assert rt.servers[0] in str(error.value)


def test_ctrl_c_ends_a_long_prefetch(rt):
    a = rt.zeros((64 << 20,), "f4")
    a[::1024] = np.arange(a.size // 1024)
    interrupted = threading.Event()

    def interrupt():
        before = rt.stats().fills
        wait_until("pages come in", lambda: rt.stats().fills > before + 100)
        interrupted.set()
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            # Many times, since a fast machine may be done with one before the signal comes.
            for _ in range(1000):
                farpage.prefetch(a)
        assert interrupted.is_set()
    finally:
        thread.join()


def test_other_threads_run_while_one_waits(rt):
    """A server that is stopped keeps `prefetch` waiting; the interpreter goes on."""
    with farpage.local(
        budget="4MiB", capacity="256MiB", url="tcp://127.0.0.1:0", deadline=60
    ) as stopped:
        a = stopped.zeros((8 << 20,), "f4")
        a[:] = np.arange(a.size)
        server = stopped._server.process.pid
        os.kill(server, signal.SIGSTOP)
        done = threading.Event()
        thread = threading.Thread(target=lambda: (farpage.prefetch(a), done.set()))
        thread.start()
        try:
            # This thread could not say so if the other held the interpreter's lock.
            rt.zeros((1000,))[:] = 1
            assert not done.is_set()
        finally:
            os.kill(server, signal.SIGCONT)
        thread.join(60)
        assert done.is_set()
        del a, thread


def test_child_made_by_fork_is_told_so(rt):
    a = rt.zeros((1 << 20,), "f4")
    a[:] = 1
    child = os.fork()
    if child == 0:
        # An error is seen by its exit status, a hang by its signal.
        signal.alarm(60)
        try:
            for call in (
                lambda: farpage.prefetch(a),
                lambda: farpage.flush(a),
                lambda: rt.zeros(3),
                lambda: rt.stats(),
                lambda: rt.open("name"),
            ):
                with pytest.raises(farpage.Error, match="made by fork"):
                    call()
            del a
            with farpage.Runtime(rt.servers, budget="8MiB") as own:
                b = own.zeros((1000,))
                b[:] = 2
                assert b.sum() == 2000
                del b
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert a.sum() == 1 << 20


def test_fork_that_ends_in_order_leaves_the_parents_arrays_alone():
    program = run(
        """
        import os, sys, farpage
        rt = farpage.local(budget="8MiB", capacity="64MiB")
        region = rt.create(f"forked-{os.getpid()}", (1000,), "f4")
        a = region.array()
        a[:] = 1
        child = os.fork()
        if child == 0:
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert a.sum() == 1000
        a[:] = 2
        del a
        region.close()
        print(rt.open(region.name).array().sum())
        """
    )
    assert program.out == "2000.0\n", program.err


@pytest.mark.parametrize("mode", ["filler", "in-thread"])
def test_pool_of_forked_processes_reads_and_writes_copies_of_arrays(mode):
    program = run(
        f"""
        import multiprocessing, farpage, numpy as np
        rt = farpage.local(budget="8MiB", capacity="128MiB", fault_mode="{mode}")
        a = rt.zeros((8, 1 << 20), "f8")
        a[:] = np.arange(8)[:, None]
        def work(row):
            before = float(a[row].sum())
            a[row] += 1
            return before, float(a[row].sum())
        with multiprocessing.get_context("fork").Pool(3) as pool:
            rows = pool.map(work, range(8))
        assert rows == [(row * 2.0 ** 20, (row + 1) * 2.0 ** 20) for row in range(8)], rows
        print([float(row.sum()) / 2 ** 20 for row in a])
        """
    )
    assert program.out == f"{[float(row) for row in range(8)]}\n", program.err


def sum_of(pickled):
    array = pickle.loads(pickled)
    assert isinstance(array, farpage.RemoteArray)
    return float(array.sum())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_named_array_is_pickled_to_other_processes_by_its_name(rt, name, method):
    with rt.create(name, (4 << 20,), "f4") as region:
        a = region.array()
        a[:] = 1
        sent = pickle.dumps(a[: 1 << 20])
        assert len(sent) < 1000
        del a
    # A name is open in one program at a time: here it is closed.
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(sum_of, sent).result(60) == 1 << 20


def test_array_at_the_programs_end_is_published_unless_an_exception_ends_it(rt, name):
    text = """
        import os, sys, farpage
        rt = farpage.Runtime(sys.argv[1], budget="8MiB")
        a = rt.{}(sys.argv[2], {}).array()
        a[:] = {}
        {}
        """
    first = run(text.format("create", "(1000,), 'f4'", 1, "pass"), rt.servers[0], name)
    assert first.code == 0, first.err
    assert rt.open(name).array().sum() == 1000
    second = run(text.format("open", "'r+'", 2, "1 / 0"), rt.servers[0], name)
    assert "ZeroDivisionError" in second.err and "are not published" in second.err
    assert rt.open(name).array().sum() == 1000
    third = run(text.format("open", "'r+'", 3, "sys.exit(0)"), rt.servers[0], name)
    assert third.code == 0, third.err
    assert rt.open(name).array().sum() == 3000


def test_example_keeps_its_heat_and_draws_it(tmp_path):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/python/heat.py")
    ended = subprocess.run(
        [sys.executable, example, "--side=2048", "--steps=2", f"--picture={tmp_path / 'heat.png'}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("2 steps in ") and "evictions" in ended.stdout
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
