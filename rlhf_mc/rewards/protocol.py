"""Messages between the pool and its workers: a length of 4 bytes, then JSON in UTF-8. No pickle.

Imported by every worker process, hence standard library only.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">I")


def send(channel: socket.socket, message: dict[str, Any], deadline: float | None = None) -> None:
    """Writes one message. EOFError: the other side is gone. TimeoutError: `deadline` (time.monotonic) has passed.

    TypeError where the message holds what JSON cannot carry.
    """
    body = json.dumps(message, default=_plain).encode()
    channel.settimeout(_remaining_seconds(deadline))
    try:
        channel.sendall(_LENGTH.pack(len(body)) + body)
    except ConnectionError as error:
        raise EOFError("the other side closed the channel") from error


def receive(channel: socket.socket, deadline: float | None = None) -> dict[str, Any]:
    """Reads one message. EOFError: the other side is gone. TimeoutError: `deadline` (time.monotonic) has passed."""
    (length,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size, deadline))
    return json.loads(_receive_exactly(channel, length, deadline))


def _receive_exactly(channel: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        channel.settimeout(_remaining_seconds(deadline))
        try:
            part = channel.recv(num_bytes - len(data))
        except ConnectionError as error:
            raise EOFError("the other side closed the channel") from error
        if not part:
            raise EOFError("the other side closed the channel")
        data += part
    return bytes(data)


def _remaining_seconds(deadline: float | None) -> float | None:
    # Never below a millisecond: an answer that has already arrived counts, however late this thread was woken.
    return None if deadline is None else max(deadline - time.monotonic(), 1e-3)


def _plain(value: Any) -> Any:
    """JSON's view of what parquet files hold: arrays as lists, dates as ISO strings."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a reward function")
