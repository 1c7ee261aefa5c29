"""Messages, files and memory between processes, here between threads of one."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from service.processes.wire.link import MAX_FILES, Link
from service.processes.wire.memory import SharedMemory

INLINE = 2**14  # largest message that travels by itself


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    ours, theirs = Link.pair()
    yield ours, theirs
    for end in (ours, theirs):
        end.socket.close()


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def text_of(num_pickled_bytes: int) -> str:
    """What makes a message of so many bytes."""
    text = "x" * (num_pickled_bytes - 100)
    return text + "x" * (num_pickled_bytes - len(pickle.dumps(text)))


def send_without_end(link: Link, message: object) -> None:
    while True:
        link.send(message)


# Messages


def test_messages_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    messages = [1, "two", {"three": [3]}, None, "x" * 5000]
    for message in messages:
        ours.send(message)
    assert [theirs.receive() for _ in messages] == [(message, []) for message in messages]
    theirs.send("back")
    assert ours.receive() == ("back", [])


@pytest.mark.parametrize("num_bytes", [INLINE - 1, INLINE, INLINE + 1, 3_000_000])
def test_messages_of_any_size_arrive_whole(ends: tuple[Link, Link], num_bytes: int) -> None:
    ours, theirs = ends
    message = text_of(num_bytes)
    assert len(pickle.dumps(message)) == num_bytes
    before = open_files()
    ours.send(message)
    ours.send("next")
    assert [theirs.receive()[0] for _ in range(2)] == [message, "next"]
    assert open_files() == before


@pytest.mark.parametrize("num_files", [1, MAX_FILES])
@pytest.mark.parametrize("num_bytes", [1000, INLINE + 1])
def test_files_arrive_as_copies_beside_a_message_of_any_size(
    ends: tuple[Link, Link], num_files: int, num_bytes: int
) -> None:
    ours, theirs = ends
    before = open_files()
    sent = [os.memfd_create("test") for _ in range(num_files)]
    for number, file in enumerate(sent):
        os.write(file, str(number).encode())
    ours.send(text_of(num_bytes), sent)
    for file in sent:
        os.close(file)
    message, files = theirs.receive()
    assert len(pickle.dumps(message)) == num_bytes
    assert [os.pread(file, 10, 0) for file in files] == [str(number).encode() for number in range(num_files)]
    assert not any(os.get_inheritable(file) for file in files)
    for file in files:
        os.close(file)
    assert open_files() == before


def test_several_threads_may_send(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    names, number = ("a", "b", "c"), 60

    def send(name: str) -> None:
        for index in range(number):
            ours.send((name, index, "x" * (30_000 if index % 7 == 0 else 10)))

    with ThreadPoolExecutor(len(names)) as threads:
        sending = [threads.submit(send, name) for name in names]
        received = [theirs.receive()[0] for _ in range(number * len(names))]
        for future in sending:
            future.result(10)
    for name in names:
        assert [index for sender, index, _ in received if sender == name] == list(range(number))


def test_link_that_does_not_block_raises_if_no_message_waits(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    theirs.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.receive()
    ours.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        send_without_end(ours, "more than the other end reads")
    theirs.socket.setblocking(True)
    assert theirs.receive()[0] == "more than the other end reads"


# The end of a line


def test_messages_sent_before_closing_arrive(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    ours.send("last words")
    ours.close()
    assert theirs.receive() == ("last words", [])
    for _ in range(2):
        with pytest.raises(EOFError):
            theirs.receive()
    with pytest.raises(ConnectionError):
        theirs.send("to nobody")


def test_end_closed_with_unread_messages_is_the_end_of_the_link(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    ours.send("never read")
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_messages_arrive_from_an_end_closed_with_unread_messages(
    ends: tuple[Link, Link],
) -> None:
    ours, theirs = ends
    ours.send("a question")
    theirs.send("last words")
    theirs.socket.close()
    assert ours.receive() == ("last words", [])
    with pytest.raises(EOFError):
        ours.receive()


def test_unread_files_are_closed_with_the_link() -> None:
    before = open_files()
    ours, theirs = Link.pair()
    ours.send("x" * 2 * INLINE, [ours.fileno()])
    ours.close()
    theirs.close()
    assert open_files() == before


@pytest.mark.parametrize("is_own_end", [True, False])
def test_closing_wakes_a_thread_that_waits_for_a_message(ends: tuple[Link, Link], is_own_end: bool) -> None:
    reader, other = ends
    reading = threading.Event()
    ended = threading.Event()

    def read() -> None:
        reading.set()
        try:
            reader.receive()
        except EOFError:
            ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(10)
    assert not ended.wait(0.05)
    (reader if is_own_end else other).close()
    assert ended.wait(10)
    thread.join(10)


def test_receiving_from_a_closed_end_of_our_own_is_the_end_of_the_link(ends: tuple[Link, Link]) -> None:
    ours, _ = ends
    ours.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_closing_twice_or_after_the_other_end_does_nothing(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    for end in (ours, theirs, ours):
        end.close()


def test_end_can_be_sent_as_a_file(ends: tuple[Link, Link]) -> None:
    ours, theirs = ends
    near, far = Link.pair()
    ours.send("take it", [far.fileno()])
    far.socket.close()
    _, [file] = theirs.receive()
    taken = Link.of_file(file)
    assert taken.socket.type == socket.SOCK_SEQPACKET
    near.send("hello")
    assert taken.receive() == ("hello", [])
    near.close()
    with pytest.raises(EOFError):
        taken.receive()
    taken.close()


# Memory


def test_memory_is_zero_at_first_and_shared() -> None:
    memory = SharedMemory.create(4096)
    other = SharedMemory(os.dup(memory.file), 4096)
    assert bytes(memory.buffer) == bytes(4096)
    memory.buffer[5] = 7
    assert other.buffer[5] == 7
    other.tensor((2,), torch.float32, 8).copy_(torch.tensor([1.5, -2.0]))
    assert memory.tensor((1, 2), torch.float32, 8).tolist() == [[1.5, -2.0]]
    for one in (memory, other):
        one.close_file()


def test_unwritten_memory_takes_no_pages() -> None:
    memory = SharedMemory.create(2**40)
    memory.buffer[2**39] = 1
    assert os.fstat(memory.file).st_blocks * 512 < 2**22
    memory.close_file()


def test_tensor_keeps_the_memory_alive_and_no_file_is_left() -> None:
    before = open_files()
    memory = SharedMemory.create(2**20)
    tensor = memory.tensor((2, 2), torch.int64, 2**19)
    tensor.fill_(3)
    memory.close_file()
    del memory
    gc.collect()
    assert tensor.tolist() == [[3, 3], [3, 3]]
    del tensor
    assert open_files() == before


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_memory_holds_tensors_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = SharedMemory.create(256)
    memory.close_file()
    tensor = memory.tensor(shape, dtype, 64)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    tensor.fill_(1)
    assert memory.tensor(shape, dtype, 64).equal(torch.ones(shape, dtype=dtype))
    assert bytes(memory.buffer[:64]) == bytes(64)
