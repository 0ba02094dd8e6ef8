"""Whatever the sizes: torch reads from the file, bit by bit, what lay in the dump, and read-back agrees."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsjournal.dump.finite import is_finite
from tests.helpers.dumps import finite_bits
from tests.helpers.sinks import Place, bits_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

sizes = st.one_of(
    st.tuples(st.sampled_from([1, 2, 511, 512, 513]), st.sampled_from([64, 576])),
    st.tuples(st.sampled_from([1, 2, 33, 150]), st.just(7168)),
    st.tuples(st.integers(1, 700), st.integers(1, 300)),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes, st.integers(1, 5), st.sampled_from(sorted(DTYPES)), st.integers(0, 1000))
def test_torch_reads_what_the_dump_held(size, num_aux, dtype, seed):
    num_tokens, hidden = size
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        made = place.make(num_tokens, num_aux=num_aux, hidden=hidden, dtype=dtype, seed=seed, sample_id="ein \udcff 名")
        written = place.write(made)
        path = place.out / written.path
        assert written.path == "rows_0-2000/data_7.ckpt"
        assert path.stat().st_size == written.nbytes
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None  # every CRC-32
        for mmap in (False, True):
            got = torch.load(path, weights_only=True, mmap=mmap)
            assert got["aux_hidden_state"].dtype == got["hidden_state"].dtype == DTYPES[dtype]
            assert got["aux_hidden_state"].shape == (1, num_tokens, num_aux * hidden)
            assert got["hidden_state"].shape == (1, num_tokens, hidden)
            assert np.array_equal(bits_of(got["aux_hidden_state"]), made.dump.aux_interleaved)
            assert np.array_equal(bits_of(got["hidden_state"]), made.dump.final)
            assert got["input_ids"].dtype == got["loss_mask"].dtype == torch.int64
            assert got["input_ids"].tolist() == list(made.sample.input_ids)
            ones = num_tokens // 3
            assert got["loss_mask"].tolist() == [0] * (num_tokens - ones) + [1] * ones
            assert got["hsjournal"] == made.sample.provenance(written.source_xxh3)
            if mmap:
                assert got["aux_hidden_state"].data_ptr() % 64 == 0
            del got
        place.verify(made, written)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_smaller_than_a_row_and_rows_that_straddle(monkeypatch, tmp_path, dtype):
    """Rows of 200 KB and more, several blocks: nothing depends on a row fitting anywhere."""
    place = Place(tmp_path)
    made = place.make(23, num_aux=5, hidden=100_003, dtype=dtype)
    written = place.write(made)
    got = torch.load(place.out / written.path, weights_only=True)
    assert np.array_equal(bits_of(got["aux_hidden_state"]), made.dump.aux_interleaved)
    assert np.array_equal(bits_of(got["hidden_state"]), made.dump.final)
    place.verify(made, written)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 199),
    st.sampled_from([1, -1]),
    st.booleans(),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_finiteness_agrees_with_torch(dtype, place, sign, nan, count, seed):
    bits = finite_bits(np.random.default_rng(seed), (1, 200), dtype).copy()
    largest = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}[dtype]
    top = 1 << (bits.dtype.itemsize * 8 - 1)
    bits[0, place] = largest | (top if sign < 0 else 0)
    assert is_finite(bits.data.cast("B"), dtype)
    bits[0, place] = (largest + 1 + (count if nan else 0)) | (top if sign < 0 else 0)
    assert not is_finite(bits.data.cast("B"), dtype)
    signed = {2: torch.int16, 4: torch.int32}[bits.dtype.itemsize]
    values = torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}")).to(signed).view(DTYPES[dtype])
    assert int((~torch.isfinite(values)).sum()) == 1
