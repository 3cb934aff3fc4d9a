"""Starts a server, loads it, asks for all of it again, and prints a digest of what it holds.

The server's arguments have `PORT` where its port belongs. Its standard error is ours.
"""

import hashlib
import random
import socket
import subprocess
import sys
import time

kind, command = sys.argv[1], sys.argv[2:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen([word.replace("PORT", str(port)) for word in command], stdout=sys.stderr)
end = time.monotonic() + 60
while True:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        break
    except OSError:
        if time.monotonic() > end or server.poll() is not None:
            sys.exit("the server does not answer")
        time.sleep(0.01)

rng = random.Random(7)
order = list(range(60_000))


def value(number):
    return random.Random(number).randbytes(500) * 4


def redis():
    """By redis-cli and redis-benchmark."""
    ask = ["redis-cli", "-p", str(port)]
    load = subprocess.Popen(
        [*ask, "--pipe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
    )
    for number in order:
        key, data = b"key:%012d" % number, value(number)
        load.stdin.write(
            b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(key), key, len(data), data)
        )
    load.stdin.close()
    assert b"errors: 0" in load.stdout.read()
    load.wait()
    count = ["-p", str(port), "-q", "-r", str(len(order)), "-n", "300000", "-P", "16"]
    subprocess.run(
        ["redis-benchmark", *count, "get", "key:__rand_int__"], stdout=sys.stderr, check=True
    )
    print(subprocess.run([*ask, "debug", "digest"], stdout=subprocess.PIPE, check=True).stdout)
    subprocess.run([*ask, "shutdown", "nosave"], stdout=subprocess.DEVNULL)


def memcached():
    """By pymemcache."""
    from pymemcache.client.base import Client

    client = Client(("127.0.0.1", port))
    for first in range(0, len(order), 500):
        part = order[first : first + 500]
        assert not client.set_many({f"key:{n}": value(n) for n in part}, noreply=False)
    hashed = hashlib.sha256()
    for turn in range(3):
        rng.shuffle(order)
        for first in range(0, len(order), 500):
            keys = [f"key:{n}" for n in order[first : first + 500]]
            held = client.get_many(keys)
            for key in keys:
                hashed.update(held[key])
    print(hashed.hexdigest())
    server.terminate()


globals()[kind]()
sys.exit(server.wait())
