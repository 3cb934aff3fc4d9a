"""What the tests share: a runtime with a server of its own, and programs that may die."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import farpage

MIB = 1 << 20


@pytest.fixture
def rt():
    """A budget of 8 MiB beside a server that lends 512 MiB."""
    with farpage.local(budget="8MiB", capacity="512MiB", deadline=30) as runtime:
        yield runtime


@pytest.fixture
def name(request):
    return f"test-{os.getpid()}-{request.node.name}"


def wait_until(what, condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.002)


class Program:
    """A program that ended."""

    def __init__(self, ended):
        self.code = ended.returncode
        self.out = ended.stdout
        self.err = ended.stderr

    @property
    def signal(self):
        return signal.Signals(-self.code).name if self.code < 0 else None


def run(text, *arguments, environment=None, seconds=60):
    """Runs a Python program to its end."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, **(environment or {})},
    )
    return Program(ended)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False
