"""Whatever bytes lie in a foreign file: it is a sample, or it is refused with a reason; nothing else happens."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors

from hsjournal.ops.foreign import ForeignError, read_foreign
from hsjournal.ops.planes import digests
from tests.helpers.foreign import as_incident, as_specforge, as_torchspec, random_states


def torch_bytes(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


STATES = random_states(range(3, 9), hidden=32)
COMBINED = {"token_ids": STATES.ids, "hidden_states": torch.stack([*STATES.aux, STATES.final], dim=1).contiguous()}
WHOLE = {
    "a.ckpt": torch_bytes(as_specforge(STATES)),
    "b.pt": torch_bytes(as_incident(STATES)),
    "c.pt": torch_bytes(as_torchspec(STATES)),
    "d.safetensors": to_safetensors(COMBINED),
}


@pytest.mark.parametrize("name", WHOLE)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    body = bytearray(WHOLE[name])
    # Offsets near either end hit headers, the pickle and the directory rather than states.
    ends = st.integers(0, 600) | st.integers(len(body) - 2200, len(body) - 1) | st.integers(0, len(body) - 1)
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(ends)] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(body)))
    path = tmp_path / name
    path.write_bytes(body[:cut])
    try:
        found = read_foreign(path)
        sums = digests(found)
    except ForeignError:
        return
    assert found.num_tokens > 0
    assert len(sums.split(",")) == found.num_aux + 1


@pytest.mark.parametrize("name", WHOLE)
def test_unchanged_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(WHOLE[name])
    found = read_foreign(path)
    assert (found.num_tokens, found.num_aux, found.hidden_size) == (6, 3, 32)
    assert found.input_ids.tolist() == STATES.ids.tolist()


@pytest.mark.parametrize(("place", "value"), [(48, 1 << 63), (32, 1 << 60), (40, 1 << 62)])
def test_a_hostile_zip64_record_is_refused(tmp_path: Path, place: int, value: int) -> None:
    """Its directory starts where no file reaches (48), has more members (32) or more bytes (40) than there can be."""
    hostile = bytearray(WHOLE["a.ckpt"])
    struct.pack_into("<I", hostile, hostile.rindex(b"PK\x05\x06") + 16, 0xFFFFFFFF)  # "see the zip64 record"
    struct.pack_into("<Q", hostile, hostile.rindex(b"PK\x06\x06") + place, value)
    path = tmp_path / "a.ckpt"
    path.write_bytes(hostile)
    with pytest.raises(ForeignError):
        read_foreign(path)


def test_a_hostile_place_of_the_zip64_record_is_refused(tmp_path: Path) -> None:
    hostile = bytearray(WHOLE["a.ckpt"])
    end = hostile.rindex(b"PK\x05\x06")
    struct.pack_into("<I", hostile, end + 16, 0xFFFFFFFF)
    struct.pack_into("<Q", hostile, hostile.rindex(b"PK\x06\x07") + 8, (1 << 64) - 1)
    path = tmp_path / "a.ckpt"
    path.write_bytes(hostile)
    with pytest.raises(ForeignError):
        read_foreign(path)
