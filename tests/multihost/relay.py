"""A slow link: forwards TCP connections and hands every piece on only after a delay, in both directions.

    python -m tests.multihost.relay LISTEN_HOST PORT TARGET_HOST DELAY_S

It stands in for `tc netem delay`: what is sent arrives late and in order, and as much as wanted is on the way at once. Opening a
connection is not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Copy until the end, each piece `delay_s` after it came."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not piece:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()

    sending = asyncio.ensure_future(deliver())
    with contextlib.suppress(OSError):
        while piece := await reader.read(1 << 16):
            pieces.put_nowait((loop.time() + delay_s, piece))
    pieces.put_nowait((loop.time() + delay_s, b""))
    with contextlib.suppress(OSError):
        await sending


async def main() -> None:
    """Serve until killed."""
    host, port, target, delay = sys.argv[1:5]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(target, int(port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(forward(reader, back, float(delay)), forward(there, writer, float(delay)))

    server = await asyncio.start_server(serve, host, int(port))
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
