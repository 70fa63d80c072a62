"""Reward functions, good and bad, that the pool's tests load by file path."""

import ctypes
import os
import socket
import subprocess
import sys
import time


def length(sample):
    return len(sample.response)


def per_token(sample):
    return [float(i) for i in sample.response_ids]


def one_too_many(sample):
    return [0.0] * (len(sample.response_ids) + 1)


def seen(sample):
    """1 if everything arrived as it was sent by the test."""
    as_sent = sample.prompt == "2 + 2 = é\ud800" and sample.prompt_ids == [5, 6] and sample.row["nested"] == {"deep": [1, None]}
    return float(as_sent and sample.truncated and sample.row["array"] == [1, 2] and sample.row["date"] == "2026-01-31")


def obey(sample, spin_on="spin"):
    """Does what the response says."""
    if sample.response == spin_on:
        while True:
            pass
    if sample.response == "hold the gil":
        ctypes.PyDLL(None).sleep(60)
    if sample.response == "raise":
        raise ValueError(f"cannot score {sample.response!r}")
    if sample.response == "exit":
        sys.exit(0)
    if sample.response == "die":
        os._exit(3)
    if sample.response == "segfault":
        ctypes.string_at(0)
    if sample.response == "leave a child":
        subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(60)
    if sample.response == "take 8 GiB":
        return float(len(bytearray(8 << 30)) > 0)
    if sample.response == "connect":
        socket.create_connection(("127.0.0.1", sample.row["port"]), timeout=2).close()
    if sample.response == "nan":
        return float("nan")
    if sample.response == "none":
        return None
    return 1.0


def chatty(sample):
    print("printed by the reward function")
    os.write(1, b"written by the reward function\n")
    subprocess.run(["echo", "echoed by the reward function"], check=True)
    assert sys.stdin.read() == ""
    return 2.0


def imports(sample):
    """How many of the heavy packages the worker has loaded, apart from what the functions themselves import."""
    return float(sum(name in sys.modules for name in ("torch", "pydantic", "numpy", "vllm", "megatron")))


def process_id(sample):
    return float(os.getpid())


def slow(sample):
    time.sleep(0.2)
    return 1.0


not_a_function = 3
