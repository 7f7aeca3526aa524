"""Downloads from several sources: fast, resumable, and safe from sources that stall or lie."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import trio

from echo_node.errors import PeerError, StoreError
from echo_node.net.base import RequestError
from echo_node.net.blobs.client import Want
from echo_node.net.blobs.partial_blob import FilePartialBlob
from echo_node.net.blobs.server import READS_EACH
from echo_node.net.rate_limit import Throttle, UploadLimit
from protocol import blob_id, canonical, encode, topics
from protocol.blob import BlobRead, Slice
from tests.net.behaviour import SOON, refused, until
from tests.net.blob_nodes import BY_BULK_PORT, MIB, QUICK, Silence, flipped, site, some_bytes


class Medium:
    """Any medium as a place to download at."""

    def __init__(self, join):
        self.join = join


IMPATIENT = dataclasses.replace(QUICK, round_pauses=())

WHOLE = some_bytes(64 * MIB)
NAME = blob_id(WHOLE)


@pytest.mark.parametrize("settings", [QUICK, BY_BULK_PORT], ids=["over-streams", "by-bulk-port"])
async def test_a_stall_a_lie_and_a_death_leave_the_download_complete_and_the_bad_ones_recorded(
    settings, tmp_path, join
):
    bulk = settings is BY_BULK_PORT
    async with site(swarm=Medium(join)) as here:
        slow = 20 * MIB  # so that there is a half-way to die at
        honest = await here.source([WHOLE], uplink=UploadLimit(each=slow), bulk=bulk)
        stalls = await here.source([WHOLE], uplink=Silence(after=3 * MIB), bulk=bulk)
        half_wrong = flipped(WHOLE, 2 * MIB)  # whichever of its pieces are asked for, some are wrong
        lies = await here.source({NAME: half_wrong}, uplink=UploadLimit(each=slow), bulk=bulk)
        dies = await here.source([WHOLE], uplink=UploadLimit(each=slow), bulk=bulk)

        def at_half_time(progress):
            if progress.done > progress.total // 2:
                dies.kill()

        blobs = here.blobs(settings)
        with trio.fail_after(60):
            paths = await blobs.fetch_to(tmp_path, [Want(NAME, len(WHOLE))], progress=at_half_time)
        assert paths == {NAME: tmp_path / NAME.hex()}
        assert paths[NAME].read_bytes() == WHOLE
        faults = blobs.sources.faults()
        assert faults[stalls.public]["stalled"] >= 1
        assert faults[lies.public]["wrong-blob"] == 1
        assert "wrong-blob" not in faults.get(honest.public, {}) | faults.get(dies.public, {})
        assert here.network.scores() == {lies.public: {"wrong-blob": 1}}
        if bulk:
            assert honest.port.counts["served"] > 1


@pytest.mark.parametrize("bulk", [False, True], ids=["over-streams", "by-bulk-port"])
async def test_a_download_that_was_killed_goes_on_where_it_was(bulk, tmp_path):
    size = 24 * MIB
    data = some_bytes(size)
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once, and reading from it is done in a thread
        [sys.executable, "-m", "tests.net.resume_program", str(tmp_path), str(size)], stdout=subprocess.PIPE
    ) as process:
        assert await trio.to_thread.run_sync(process.stdout.readline) == b"half\n"
        process.kill()
    assert not (tmp_path / blob_id(data).hex()).exists(), "nothing half-written under the final name"
    async with site() as here:
        source = await here.source([data], bulk=bulk)
        blobs = here.blobs(BY_BULK_PORT if bulk else QUICK)
        paths = await blobs.fetch_to(tmp_path, [Want(blob_id(data), size)])
        assert paths[blob_id(data)].read_bytes() == data
        assert blobs.sources.of(source.public).received <= size // 2, "only the rest was fetched"
        assert [path.name for path in tmp_path.iterdir()] == [blob_id(data).hex()]
        received = blobs.sources.of(source.public).received
        await blobs.fetch_to(tmp_path, [Want(blob_id(data), size)])
        assert blobs.sources.of(source.public).received == received, "what is there is not fetched again"


async def test_a_piece_on_disk_that_was_a_lie_is_found_out_and_blamed_on_nobody(tmp_path):
    data = some_bytes(8 * MIB)
    partial = FilePartialBlob(tmp_path, blob_id(data), len(data))
    wrong = flipped(data[:MIB])
    partial.write(0, wrong, blob_id(wrong))
    partial.close()
    async with site() as here:
        await here.source([data])
        blobs = here.blobs()
        paths = await blobs.fetch_to(tmp_path, [Want(blob_id(data), len(data))])
        assert paths[blob_id(data)].read_bytes() == data
        assert blobs.sources.faults() == {}


async def test_many_small_blobs_travel_many_in_a_question(tmp_path):
    many = [some_bytes(2_000 + n, seed=n) for n in range(600)]
    wants = [Want(blob_id(data), len(data)) for data in many]
    async with site() as here:
        sources = [await here.source(many, announce=False) for _ in range(3)]
        named = [source.public for source in sources]
        blobs = here.blobs()
        assert await blobs.fetch(wants, named=named) == {blob_id(data): data for data in many}
        assert sum(source.network.counts()["answered"] for source in sources) < 60
        paths = await blobs.fetch_to(tmp_path, wants, named=named)
        assert {path.read_bytes() for path in paths.values()} == set(many)
        assert len(list(tmp_path.iterdir())) == len(many)


async def test_sources_that_hold_different_blobs_each_give_theirs():
    many = [some_bytes(3_000_000, seed=n) for n in range(8)]
    async with site() as here:
        named = [(await here.source([data], announce=False)).public for data in many]
        found = await here.blobs().fetch([Want(blob_id(data), len(data)) for data in many], named=named)
        assert found == {blob_id(data): data for data in many}


async def test_more_than_256_wants_are_refused():
    async with site() as here:
        source = await here.source([b"x"])
        for count in (0, 257):
            question = canonical.encode({"blobs": bytes(32) * count})
            error = await refused(
                here.network.request(source.public, topics.WANTS_STREAM, question, deadline=SOON, most=4096)
            )
            assert error.reason == "refused"
            assert "out-of-range" in str(error)


@pytest.mark.parametrize("size", [1_000, 6 * MIB], ids=["small", "of-many-pieces"])
async def test_wrong_bytes_cost_their_sender_its_place_and_the_download_goes_on(size):
    data = some_bytes(size)
    async with site() as here:
        liar = await here.source({blob_id(data): flipped(data, 100)})
        blobs = here.blobs()
        with pytest.raises(PeerError, match="cannot be had"):
            await here.blobs(IMPATIENT).fetch([Want(blob_id(data), size)])
        await here.source([data])
        assert await blobs.fetch([Want(blob_id(data), size)]) == {blob_id(data): data}
        assert set(here.network.scores()) == {liar.public}
        assert await blobs.fetch([Want(blob_id(data), size)]) == {blob_id(data): data}


@pytest.mark.parametrize("known", [True, False], ids=["known-size", "unknown-size"])
async def test_sizes_that_are_wrong_are_refused_early(known):
    data = some_bytes(6 * MIB)
    name = blob_id(data)
    async with site() as here:
        longer = await here.source({name: data + b"more"})
        giant = await here.source({name: bytes(32 * MIB)})
        await here.source([data])
        await here.source([data])
        blobs = here.blobs()
        want = Want(name, len(data)) if known else Want(name, most=8 * MIB)
        assert await blobs.fetch([want]) == {name: data}
        faults = blobs.sources.faults()
        assert faults[giant.public] == {"wrong-size": 1}
        assert blobs.sources.of(giant.public).received == 0
        if known:
            assert faults[longer.public] == {"wrong-size": 1}
        assert here.network.scores() == {}


async def test_where_most_say_a_wrong_size_the_right_one_is_found_after_they_are_caught():
    data = some_bytes(5 * MIB)
    name = blob_id(data)
    async with site() as here:
        liars = [await here.source({name: data[:-1]}) for _ in range(3)]
        await here.source([data])
        assert await here.blobs().fetch([Want(name)]) == {name: data}
        assert set(here.network.scores()) == {liar.public for liar in liars}


async def test_an_answer_of_another_length_is_none():
    data = some_bytes(3_000)
    async with site() as here:
        source = await here.source([data])

        async def short(_peer, _question):
            return data[:-1]

        source.desk_reads(short)
        blobs = here.blobs(IMPATIENT)
        with pytest.raises(PeerError, match="cannot be had"):
            await blobs.fetch([Want(blob_id(data), len(data))])
        assert blobs.sources.faults() == {source.public: {"wrong-size": 1}}


async def test_an_empty_blob_is_had_from_whoever_holds_it_and_no_other_passes_for_it(tmp_path):
    async with site() as here:
        await here.source([b""])
        blobs = here.blobs(IMPATIENT)
        assert await blobs.fetch([Want(blob_id(b""))]) == {blob_id(b""): b""}
        paths = await blobs.fetch_to(tmp_path, [Want(blob_id(b""))])
        assert paths[blob_id(b"")].read_bytes() == b""
        liar = await here.source({bytes(32): b""})
        with pytest.raises(PeerError):
            await blobs.fetch([Want(bytes(32))])
        assert set(here.network.scores()) == {liar.public}


async def test_the_last_pieces_are_asked_of_two_and_the_first_to_bring_them_wins():
    data = some_bytes(8 * MIB)
    async with site() as here:
        stalls = await here.source([data], uplink=Silence(after=MIB))
        await here.source([data], uplink=UploadLimit(each=30 * MIB))
        blobs = here.blobs(dataclasses.replace(QUICK, stall_floor=60.0, stall_cap=60.0))
        with trio.fail_after(30):
            assert await blobs.fetch([Want(blob_id(data), len(data))]) == {blob_id(data): data}
        assert blobs.asked_again > 0
        assert blobs.sources.faults() == {}, "it was not waited for, nor long enough to blame it"
        assert stalls.network.counts()["answered"] >= 2


async def test_a_source_that_went_is_replaced_by_a_spare_one():
    data = some_bytes(40 * MIB)
    async with site() as here:
        sources = [await here.source([data], uplink=UploadLimit(each=16 * MIB)) for _ in range(6)]
        seen, killed = [], []

        def kill_two(progress):
            seen.append(progress)
            if not killed and progress.done > progress.total // 8:
                killed.extend(each for each in sources if each.network.counts()["answered"] > 1)
                for each in killed[:2]:
                    each.kill()

        blobs = here.blobs(dataclasses.replace(QUICK, bulk_from=2**40))
        assert await blobs.fetch([Want(blob_id(data), len(data))], progress=kill_two) == {blob_id(data): data}
        assert 2 <= len(killed) <= 4, "four at once"
        asked = [each for each in sources if each.network.counts()["answered"] > 1]
        assert len(asked) > 4, "spare ones were asked as well"
        assert seen[-1].done == seen[-1].total == len(data)
        assert [each.done for each in seen] == sorted(each.done for each in seen)
        assert max(each.sources for each in seen) <= 4
        assert here.network.scores() == {}


async def test_faster_sources_give_more():
    data = some_bytes(32 * MIB)
    async with site() as here:
        slow = await here.source([data], uplink=UploadLimit(each=4 * MIB))
        fast = await here.source([data], uplink=UploadLimit(each=32 * MIB))
        blobs = here.blobs(dataclasses.replace(QUICK, stall_floor=30.0, stall_cap=30.0, bulk_from=2**40))
        await blobs.fetch([Want(blob_id(data), len(data))])
        assert blobs.sources.of(fast.public).received > 2 * blobs.sources.of(slow.public).received


@pytest.mark.parametrize("bulk", [False, True], ids=["over-streams", "by-bulk-port"])
async def test_the_downlink_is_never_faster_than_its_limit(bulk):
    data, rate = some_bytes(8 * MIB), 8 * MIB
    async with site() as here:
        for _ in range(2):
            await here.source([data], bulk=bulk)
        blobs = here.blobs(BY_BULK_PORT if bulk else QUICK, downlink=Throttle(rate))
        start = trio.current_time()
        await blobs.fetch([Want(blob_id(data), len(data))])
        assert len(data) / (trio.current_time() - start) < 1.5 * rate
        assert blobs.sources.faults() == {}, "waiting for ourselves is nobody's stall"


async def test_a_node_that_leaves_ends_its_downloads_and_says_so():
    data = some_bytes(8 * MIB)
    async with site() as here:
        await here.source([data], uplink=Silence(after=2 * MIB))

        def leave(_progress):
            here.swarm._leave(here.network)

        with pytest.raises(RequestError) as caught:
            await here.blobs().fetch([Want(blob_id(data), len(data))], progress=leave)
        assert caught.value.reason == "left"


async def test_a_disk_that_fails_ends_the_download_with_the_disks_name(tmp_path, monkeypatch):
    data = some_bytes(6 * MIB)

    def full(_self, _offset, _data, _digest):
        raise StoreError("no space left")

    monkeypatch.setattr(FilePartialBlob, "write", full)
    async with site() as here:
        source = await here.source([data])
        blobs = here.blobs()
        with pytest.raises(StoreError, match="no space left"):
            await blobs.fetch_to(tmp_path, [Want(blob_id(data), len(data))])
        assert source.public not in blobs.sources.faults()
        assert not (tmp_path / blob_id(data).hex()).exists()


async def test_no_more_than_was_allowed_is_taken_into_memory():
    many = [some_bytes(1000, seed=n) for n in range(5)]
    async with site() as here:
        await here.source(many)
        wants = [Want(blob_id(data)) for data in many]
        assert len(await here.blobs().fetch(wants, most=5000)) == 5
        with pytest.raises(PeerError, match="more than 4999 bytes"):
            await here.blobs().fetch(wants, most=4999)


async def test_what_nobody_has_is_said_so_and_a_cancelled_download_leaves_nothing_behind(tmp_path):
    data = some_bytes(6 * MIB)
    async with site() as here:
        with pytest.raises(PeerError, match="1 of 1 blobs cannot be had"):
            await here.blobs(IMPATIENT).fetch([Want(bytes(32))])
        await here.source([data], uplink=Silence(after=2 * MIB))
        with trio.move_on_after(0.5):
            await here.blobs().fetch_to(tmp_path, [Want(blob_id(data), len(data))])
        assert not (tmp_path / blob_id(data).hex()).exists()
        await here.source([data])
        paths = await here.blobs().fetch_to(tmp_path, [Want(blob_id(data), len(data))])
        assert paths[blob_id(data)].read_bytes() == data


async def test_a_peer_that_asks_for_too_much_at_once_is_told_so():
    data = some_bytes(3 * MIB)
    async with site() as here:
        source = await here.source([data], uplink=Silence())
        question = encode(BlobRead((Slice(blob_id(data), 0, MIB),)))
        refusals = []

        async def ask():
            try:
                await here.network.request(source.public, topics.BLOB_STREAM, question, deadline=1, most=MIB)
            except RequestError as error:
                refusals.append(error.reason)

        async with trio.open_nursery() as nursery:
            for _ in range(READS_EACH + 3):
                nursery.start_soon(ask)
        assert sorted(refusals) == ["deadline"] * READS_EACH + ["refused"] * 3


async def test_the_address_is_that_of_the_connection_and_none_without_one():
    async with site() as here:
        source = await here.source([b"x"])
        assert here.network.address(source.public) == "127.0.0.1"
        assert here.network.address(bytes(32)) is None
        source.kill()
        await until(lambda: source.public not in here.network.peers())
        assert here.network.address(source.public) is None
    async with site(address=None) as here:
        assert here.network.address((await here.source([b"x"])).public) is None
