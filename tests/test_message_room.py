import asyncio

from tpu_sync_rl.message_room import MessageRoom


def test_streams_wait_for_room_but_not_the_first_one():
    async def run():
        room = MessageRoom(100)
        await room.take("first", 60)
        await room.take("second", 40)
        waiting = asyncio.ensure_future(room.take("second", 1))
        late = asyncio.ensure_future(room.take("third", 1))
        await asyncio.sleep(0)
        await room.take("first", 500)
        assert not waiting.done() and not late.done()
        room.give_back("first")
        await asyncio.gather(waiting, late)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_stream_that_ends_while_it_waits_leaves_the_room_to_others():
    async def run():
        room = MessageRoom(100)
        await room.take("first", 100)
        for stream in ("second", "third"):
            ended = asyncio.ensure_future(room.take(stream, 100))
            await asyncio.sleep(0)
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            room.give_back(stream)
        room.give_back("first")
        room.give_back("first")
        await room.take("fourth", 1000)

    asyncio.run(asyncio.wait_for(run(), 10))
