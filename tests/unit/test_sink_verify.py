from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from hsjournal.dump.protocol import RequestId
from hsjournal.sink import readback
from hsjournal.sink.readback import Method
from hsjournal.sink.verify import Damage, DamageError, verify_file
from tests.helpers.sinks import SPECFORGE, Place, ignore


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def damage(place, made, written) -> DamageError:
    with pytest.raises(DamageError) as caught:
        place.verify(made, written)
    return caught.value


def test_a_sound_file_is_read_past_the_page_cache(place):
    made = place.make()
    written = place.write(made)
    assert place.verify(made, written) is Method.DIRECT


def test_a_change_on_the_storage_behind_the_page_cache_is_seen(place):
    """Pages that are cached and clean say the old bytes; the storage says others."""
    made = place.make(300)
    written = place.write(made)
    path = place.out / written.path
    path.read_bytes()  # cached now
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    import mmap

    with mmap.mmap(-1, 4096) as page:
        os.preadv(fd, [page], 4096)
        page[100] ^= 1
        os.pwrite(fd, page, 4096)
    os.close(fd)
    assert damage(place, made, written).kind is Damage.WRONG_DIGEST


def test_missing_is_named_with_and_without_its_folder(place):
    made = place.make()
    written = place.write(made)
    (place.out / written.path).unlink()
    assert damage(place, made, written).kind is Damage.MISSING
    (place.out / "rows_0-2000").rmdir()
    assert damage(place, made, written).kind is Damage.MISSING


def test_an_output_folder_that_is_gone_is_no_damage_of_its_files(place):
    made = place.make()
    written = place.write(made)
    out = place.out
    shutil.move(out, place.base / "elsewhere")
    with pytest.raises(FileNotFoundError):
        verify_file(out, SPECFORGE, made.sample, written, ignore)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_unreadable(place, kind):
    made = place.make()
    written = place.write(made)
    path = place.out / written.path
    path.rename(place.base / "moved")
    if kind == "link":
        path.symlink_to(place.base / "moved")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert damage(place, made, written).kind is Damage.UNREADABLE


@pytest.mark.parametrize(
    ("code", "damaged"), [(errno.EIO, True), (errno.EUCLEAN, True), (errno.ESTALE, False), (errno.EACCES, False)]
)
def test_an_io_error_is_damage_and_other_troubles_are_the_storages(place, monkeypatch, code, damaged):
    made = place.make()
    written = place.write(made)
    real = os.preadv
    calls = iter(range(100))

    def failing(fd, buffers, offset):
        if next(calls) == 1:  # the first asks whether the page cache can be passed by
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    if damaged:
        assert damage(place, made, written).kind is Damage.UNREADABLE
    else:
        with pytest.raises(OSError) as caught:
            place.verify(made, written)
        assert caught.value.errno == code


def test_another_samples_file_is_named(place):
    made, other = place.make(row=7), place.make(row=8, seed=8)
    written, theirs = place.write(made), place.write(other)
    shutil.copy(place.out / theirs.path, place.out / written.path)
    error = damage(place, made, written)
    assert error.kind is Damage.WRONG_CONTENT
    assert "'sample-8' instead of 'sample-7'" in error.detail


def test_another_attempts_file_is_named(place):
    made = place.make(attempt=1)
    written = place.write(made)
    place.write(place.make(attempt=2, seed=1))
    assert damage(place, made, written).kind is Damage.WRONG_CONTENT


def test_three_hundred_damages_are_all_found_and_named(place):
    """Seeded; of every kind; and the sound files between them are never accused."""
    dice = random.Random(7)
    made = [
        place.make(dice.choice([1, 5, 100, 513]), row=row, seed=row, hidden=dice.choice([8, 64, 576]))
        for row in range(6)
    ]
    written = [place.write(m) for m in made]
    found = dict.fromkeys(("missing", "short", "flip", "zeros", "other", "longer"), 0)
    for turn in range(300):
        index = dice.randrange(len(made))
        path = place.out / written[index].path
        sound = path.read_bytes()
        kind = dice.choice(list(found))
        expected: set[Damage]
        if kind == "missing":
            path.unlink()
            expected = {Damage.MISSING}
        elif kind == "short":
            lost = dice.choice([1, 2, 22, 100, len(sound) // 2, len(sound) - 1, len(sound)])
            path.write_bytes(sound[:-lost])
            expected = {Damage.WRONG_SIZE}
        elif kind == "flip":
            bad = bytearray(sound)
            bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
            path.write_bytes(bad)
            expected = {Damage.WRONG_DIGEST}
        elif kind == "zeros":
            at = dice.randrange(0, len(sound), 4096)
            bad = bytearray(sound)
            bad[at : at + 4096] = bytes(len(bad[at : at + 4096]))
            path.write_bytes(bad)
            expected = {Damage.WRONG_DIGEST}
        elif kind == "other":
            path.write_bytes((place.out / written[(index + 1) % len(made)].path).read_bytes())
            expected = {Damage.WRONG_CONTENT}
        else:
            path.write_bytes(sound + dice.randbytes(dice.choice([1, 4096, 100_000])))
            expected = {Damage.WRONG_SIZE}
        error = damage(place, made[index], written[index])
        assert error.kind in expected, (turn, kind, str(error))
        found[kind] += 1
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(sound)
        assert place.verify(made[index], written[index]) is Method.DIRECT
    assert min(found.values()) > 20


def test_a_flipped_bit_names_the_tensor(place):
    made = place.make(300)
    written = place.write(made)
    path = place.out / written.path
    data = bytearray(path.read_bytes())
    at = data.index(made.dump.final[200].tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert damage(place, made, written).detail.endswith("in hidden_state")


def test_a_flipped_bit_anywhere_counts():
    """In memory, since it is read some hundred times: headers, padding, pickle and the zip's directory too."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        place = Place(folder)
        made = place.make(1, num_aux=1, hidden=2)
        written = place.write(made)
        path = place.out / written.path
        sound = path.read_bytes()
        for at in range(0, len(sound), 3):
            bad = bytearray(sound)
            bad[at] ^= 1 << (at % 8)
            path.write_bytes(bad)
            assert damage(place, made, written).kind is Damage.WRONG_DIGEST, at
    finally:
        shutil.rmtree(folder)


def test_a_wrong_interleave_cannot_bless_itself(place):
    """The container is as it was written, digest and all, but its tensors are not the dump's."""
    made = place.make(300)
    written = place.write(made)
    path = place.out / written.path
    data = bytearray(path.read_bytes())
    at = data.index(made.dump.aux_interleaved.tobytes())
    wrong = made.dump.aux_interleaved.reshape(300, 3, 64)[:, ::-1].tobytes()
    data[at : at + len(wrong)] = wrong
    path.write_bytes(data)
    blessed = replace(written, output_xxh3=xxhash.xxh3_128(bytes(data)).hexdigest())
    error = damage(place, made, blessed)
    assert error.kind is Damage.WRONG_TENSOR
    assert "aux_hidden_state" in error.detail


@pytest.mark.parametrize("part", ["input_ids", "loss_mask", "provenance", "pickle"])
def test_ids_mask_and_header_are_compared_too(place, part):
    made = place.make(300)
    written = place.write(made)
    path = place.out / written.path
    data = bytearray(path.read_bytes())
    needle = {
        "input_ids": made.sample.ids_int64().tobytes(),
        "loss_mask": made.sample.mask_int64().tobytes(),
        "provenance": b"final_norm",
        "pickle": b"HalfStorage" if made.sample.dtype == "float16" else b"BFloat16Storage",
    }[part]
    data[data.index(needle)] ^= 1
    path.write_bytes(data)
    blessed = replace(written, output_xxh3=xxhash.xxh3_128(bytes(data)).hexdigest())
    assert damage(place, made, blessed).kind is Damage.WRONG_TENSOR


@pytest.mark.parametrize(
    "change",
    [
        {"sample_id": "somebody else", "row": 8},
        {"hidden_size": 65},
        {"dtype": "float16"},
        {"capture_layers": (1, 3, 6)},
        {"rid": RequestId.sample("abcd", 7, 2, 300)},
    ],
)
def test_a_sound_file_of_something_else_is_not_taken(place, change):
    made = place.make(300)
    written = place.write(made)
    with pytest.raises(DamageError) as caught:
        verify_file(place.out, SPECFORGE, replace(made.sample, **change), written, ignore)
    assert caught.value.kind in (Damage.WRONG_CONTENT, Damage.WRONG_TENSOR)


def test_in_memory_it_is_said_so(tmp_path):
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        place = Place(folder)
        made = place.make()
        assert place.verify(made, place.write(made)) is Method.MEMORY
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "method"), [("nfs4", Method.DIRECT_NETWORK), ("fuse.sshfs", Method.DIRECT_NETWORK), ("xfs", Method.DIRECT)]
)
def test_a_network_file_system_is_said(place, monkeypatch, kind, method):
    monkeypatch.setattr(readback, "file_system_type", lambda _: kind)
    made = place.make()
    assert place.verify(made, place.write(made)) is method


def test_a_small_file_is_read_once_and_a_large_one_ahead_of_its_use(place, monkeypatch):
    made = place.make()
    written = place.write(made)
    real, reads = os.preadv, []

    def noted(fd, buffers, offset):
        reads.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    place.verify(made, written)
    assert reads == [0, 0], "whether the page cache can be passed by, and the whole"
    monkeypatch.setattr(readback, "BLOCK_BYTES", 4096)
    folder = os.open((place.out / written.path).parent, os.O_RDONLY)
    try:
        with readback.ReadBack(folder, Path(written.path).name, place.out) as file:
            blocks = file.blocks()
            reads.clear()
            next(blocks)
            deadline = time.monotonic() + 10
            while 4096 not in reads and time.monotonic() < deadline:
                time.sleep(0.001)
            assert 4096 in reads, "the second block is on its way while the first is in use"
            blocks.close()
    finally:
        os.close(folder)


def test_a_file_of_many_blocks_and_odd_sizes(place, monkeypatch):
    monkeypatch.setattr(readback, "BLOCK_BYTES", 4096)
    for row, (tokens, hidden, dtype) in enumerate([(333, 7, "bfloat16"), (500, 13, "float32"), (64, 1000, "float16")]):
        made = place.make(tokens, row=row, hidden=hidden, dtype=dtype)
        written = place.write(made)
        place.verify(made, written)
        assert written.nbytes > 3 * 4096
