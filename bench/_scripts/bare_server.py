"""A bare asyncio server, control of coordinator_scale.py: a line for each line, and a line to all connections for a line "all".

Run as `python bare_server.py LISTENING_FD`.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from typing import cast

REPLY = b'{"type":"reply","epoch":1,"id":12345,"ok":true,"result":{"lease_s":5.0,"now_ns":1700000000000000000}}\n'
everyone: set[asyncio.Transport] = set()


class Lines(asyncio.Protocol):
    """One connection; the clients send a line at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        everyone.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        everyone.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        for transport in everyone if data.startswith(b"all") else (self.transport,):
            transport.write(REPLY)


async def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listening = socket.socket(fileno=int(sys.argv[1]))
    server = await asyncio.get_running_loop().create_server(Lines, sock=listening, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
