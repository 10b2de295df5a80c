"""A TCP proxy that is a bad line: it holds bytes back, and drops each connection some seconds after it was opened.

Run it as ``python proxy.py SEED LISTEN=TARGET ...``, each of LISTEN and TARGET as ``host:port``; it prints a line for
every connection that it opened, and one for every connection that it dropped.
"""

import asyncio
import random
import sys
from functools import partial

HELD = 0.05
"""Seconds for which bytes are held back at most."""

LIFE = 3.0, 12.0
"""Seconds that a connection has: at least and at most."""


async def carry(reader, writer, rng):
    while data := await reader.read(2**16):
        await asyncio.sleep(rng.uniform(0, HELD))
        writer.write(data)
        await writer.drain()
    writer.close()


async def connect(reader, writer, target, rng):
    """Be a line between one who connected and a target, until either leaves or its time is over."""
    life = rng.uniform(*LIFE)
    try:
        behind_reader, behind_writer = await asyncio.open_connection(*target.split(":"))
    except OSError:
        writer.transport.abort()
        return
    print("opened", target, flush=True)
    ways = [asyncio.create_task(way) for way in (carry(reader, behind_writer, rng), carry(behind_reader, writer, rng))]
    _, running = await asyncio.wait(ways, timeout=life)
    for way in running:
        way.cancel()
    await asyncio.gather(*ways, return_exceptions=True)
    if running:
        print("dropped", target, flush=True)
    for end in (writer, behind_writer):
        end.transport.abort()


async def main(seed, *lines):
    rng = random.Random(int(seed))
    async with asyncio.TaskGroup() as group:
        for line in lines:
            listen, target = line.split("=")
            server = await asyncio.start_server(partial(connect, target=target, rng=rng), *listen.split(":"))
            group.create_task(server.serve_forever())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
