"""Slicing of SGLang's forward passes, and their way through pieces and writer threads into dumps, without SGLang."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsjournal.capture import sglang_capture
from hsjournal.capture.sglang_assembly import Assemblies, Assembly
from hsjournal.capture.sglang_capture import Capture
from hsjournal.capture.sglang_pieces import Pieces, piece_plan
from hsjournal.capture.sglang_rows import RowsError, RowSlice, our_slices, runs_of, split_tensors
from hsjournal.capture.sglang_setup import is_writer, prenorm_refusal, refusal_of, settings_from
from hsjournal.dump.protocol import DONE, ERROR, META, CaptureFailure, FailureReason, Meta, RequestId, token_ids_sha256
from tests.unit.test_sglang_layers import always_plus_one, make_model

HIDDEN, NUM_AUX = 8, 3


def rid(row: int, tokens: int) -> str:
    return str(RequestId.sample("test0", row, 1, tokens))


def batch(*parts: tuple[str, int, int], pad: int = 0) -> Any:
    """A forward batch of (rid, length, prefix); token ids are 1000 x (position in the packed pass)."""
    total = sum(length for _, length, _ in parts) + pad
    return SimpleNamespace(
        rids=[p[0] for p in parts],
        extend_seq_lens_cpu=[p[1] for p in parts],
        extend_prefix_lens_cpu=[p[2] for p in parts],
        input_ids=torch.arange(total),
    )


def packed(total: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(total, HIDDEN, generator=draw), torch.randn(total, NUM_AUX * HIDDEN, generator=draw)


def test_foreign_rows_move_the_slices_and_padding_does_not() -> None:
    got = our_slices(batch(("other", 5, 0), (rid(1, 9), 4, 0), ("dec", 1, 77), (rid(2, 6), 6, 3), pad=20))
    assert [(s.start, s.length, s.prefix) for s in got] == [(5, 4, 0), (10, 6, 3)]
    assert [[s.rid.row for s in run] for run in runs_of(got)] == [[1], [2]]


def test_neighbours_form_one_run() -> None:
    got = runs_of(our_slices(batch((rid(1, 4), 4, 0), (rid(2, 5), 5, 0), ("other", 1, 0), (rid(3, 2), 2, 0))))
    assert [[s.rid.row for s in run] for run in got] == [[1, 2], [3]]


@pytest.mark.parametrize("bad", ["hsj-../evil", "hsj-test0-1-1-", "HEALTH_CHECK_1", "hsj-test0-01-1-5"])
def test_ids_that_are_not_ours_are_nobodys_business(bad: str) -> None:
    assert our_slices(batch((bad, 5, 0))) == []


def test_decode_has_no_slices_and_lengths_that_do_not_fit_are_an_error() -> None:
    assert our_slices(SimpleNamespace(rids=[rid(1, 4)], extend_seq_lens_cpu=None)) == []
    broken = batch((rid(1, 4), 4, 0), (rid(2, 4), 4, 0))
    broken.extend_seq_lens_cpu = [4]
    with pytest.raises(RowsError):
        our_slices(broken)


def test_packed_and_listed_aux_are_the_same_tensors() -> None:
    hidden, aux = packed(7, 0)
    one = split_tensors(hidden, aux, NUM_AUX, HIDDEN, torch.float32, 7)
    other = split_tensors(hidden, list(aux.split(HIDDEN, dim=1)), NUM_AUX, HIDDEN, torch.float32, 7)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(one[-1], hidden)


@pytest.mark.parametrize(
    "change",
    [
        lambda h, a: (h, None),
        lambda h, a: (h, a[:, :-1]),
        lambda h, a: (h, list(a.split(HIDDEN, dim=1))[:2]),
        lambda h, a: (h[:3], a),
        lambda h, a: (h.to(torch.bfloat16), a),
    ],
)
def test_states_of_another_shape_number_or_type_are_an_error(change: Any) -> None:
    hidden, aux = change(*packed(7, 0))
    with pytest.raises(RowsError):
        split_tensors(hidden, aux, NUM_AUX, HIDDEN, torch.float32, 7)


def runner() -> Any:
    model = make_model("llama", always_plus_one)
    model.parameters = lambda: iter([torch.zeros(1)])
    config = SimpleNamespace(num_hidden_layers=8, hidden_size=HIDDEN, vocab_size=100, context_len=4096)
    return SimpleNamespace(model=model, model_config=config, dtype=torch.float32)


def capture_into(root: Path, **args: Any) -> Capture:
    settings = settings_from({"HSJOURNAL_HANDOVER_ROOT": str(root)})
    assert settings is not None
    return Capture(settings, "0.5.23", {"chunked_prefill_size": 64, **args}, {}, runner())


def arrived(root: Path, name: str) -> Path:
    deadline = time.monotonic() + 10
    while not (root / name).is_dir():
        assert time.monotonic() < deadline, sorted(p.name for p in root.iterdir())
        time.sleep(0.005)
    return root / name


def failure(root: Path, name: str) -> CaptureFailure:
    folder = arrived(root, name)
    assert not (folder / DONE).exists()
    return CaptureFailure.from_json((folder / ERROR).read_bytes())


def tensors(folder: Path) -> tuple[Meta, list[torch.Tensor]]:
    assert (folder / DONE).exists(), (folder / ERROR).read_text()
    meta = Meta.from_json((folder / META).read_bytes())
    return meta, [
        torch.frombuffer(bytearray((folder / t.file).read_bytes()), dtype=torch.float32).view(t.shape)
        for t in meta.tensors
    ]


@pytest.mark.parametrize("listed", [False, True])
def test_chunks_mixed_with_others_and_padded_are_assembled(tmp_path: Path, listed: bool) -> None:
    root = tmp_path / "root"
    capture = capture_into(root)
    passes = [
        batch(("other", 3, 0), (rid(1, 10), 4, 0), (rid(2, 2), 2, 0), pad=5),
        batch((rid(1, 10), 5, 4), ("decoding", 1, 40), (rid(3, 3), 3, 0)),
        batch(("other", 6, 3), (rid(1, 10), 1, 9)),
    ]
    where = {1: [(0, 3, 4), (1, 0, 5), (2, 6, 1)], 2: [(0, 7, 2)], 3: [(1, 6, 3)]}
    states = [packed(len(b.input_ids), seed) for seed, b in enumerate(passes)]
    for b, (hidden, aux) in zip(passes, states, strict=True):
        capture.take_pass(b, hidden, list(aux.split(HIDDEN, dim=1)) if listed else aux)
        hidden.clone(), aux.clone()
    for row, parts in where.items():
        meta, got = tensors(arrived(root, rid(row, sum(n for _, _, n in parts))))
        wanted = [
            torch.cat([states[p][1][s : s + n, i * HIDDEN : (i + 1) * HIDDEN] for p, s, n in parts])
            for i in range(NUM_AUX)
        ]
        wanted.append(torch.cat([states[p][0][s : s + n] for p, s, n in parts]))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        ids = [int(t) for p, s, n in parts for t in passes[p].input_ids[s : s + n]]
        assert meta.token_ids_sha256 == token_ids_sha256(ids)
        offsets = [sum(n for _, _, n in parts[:i]) for i in range(len(parts))]
        assert list(meta.chunks) == offsets
    assert sorted(p.name for p in root.iterdir()) == sorted(rid(r, sum(n for _, _, n in w)) for r, w in where.items())


def test_the_model_may_reuse_its_memory_as_soon_as_the_pass_was_taken(tmp_path: Path) -> None:
    capture, (hidden, aux) = capture_into(tmp_path / "root"), packed(6, 1)
    kept = hidden.clone()
    capture.take_pass(batch((rid(1, 6), 6, 0)), hidden, aux)
    hidden.fill_(9.0)
    aux.fill_(9.0)
    _, got = tensors(arrived(tmp_path / "root", rid(1, 6)))
    assert torch.equal(got[-1], kept)


def test_a_pass_larger_than_a_piece_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = (4, 1 << 10)
    monkeypatch.setattr("hsjournal.capture.sglang_pieces.piece_plan", lambda *_: plan)
    capture, (hidden, aux) = capture_into(tmp_path / "root"), packed(300, 2)
    capture.take_pass(batch((rid(1, 170), 170, 0), (rid(2, 130), 130, 0)), hidden, aux)
    assert torch.equal(tensors(arrived(tmp_path / "root", rid(1, 170)))[1][-1], hidden[:170])
    assert torch.equal(tensors(arrived(tmp_path / "root", rid(2, 130)))[1][0], aux[170:, :HIDDEN])


def test_a_retracted_request_starts_over_and_keeps_no_row_of_the_first_try(tmp_path: Path) -> None:
    capture, (first, aux), (second, aux2) = capture_into(tmp_path / "root"), packed(5, 3), packed(8, 4)
    capture.take_pass(batch((rid(1, 8), 5, 0)), first, aux)
    capture.take_pass(batch((rid(1, 8), 8, 0)), second, aux2)
    meta, got = tensors(arrived(tmp_path / "root", rid(1, 8)))
    assert meta.chunks == (0,)
    assert torch.equal(got[-1], second)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(rid(1, 8), 5, 3)], FailureReason.PREFIX_HIT),
        ([(rid(1, 8), 9, 0)], FailureReason.MISMATCH),
        ([(rid(1, 8), 3, 0), (rid(1, 8), 2, 5)], FailureReason.INTERNAL),
    ],
)
def test_passes_that_do_not_add_up_end_as_a_typed_error(
    tmp_path: Path, parts: list[tuple[str, int, int]], reason: FailureReason
) -> None:
    capture = capture_into(tmp_path / "root")
    for part in parts:
        capture.take_pass(batch(part), *packed(part[1], 5))
    assert failure(tmp_path / "root", rid(1, 8)).reason is reason


def test_a_request_that_ends_early_or_is_aborted_says_so_and_a_finished_id_serves_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    capture = capture_into(root)
    for row in (1, 2, 3):
        capture.take_pass(batch((rid(row, 8), 3, 0)), *packed(3, row))
    capture.finished(rid(1, 8), aborted=False)
    capture.finished(rid(2, 8), aborted=True)
    capture.aborted(rid(3, 8), everything=False)
    reasons = [failure(root, rid(row, 8)).reason for row in (1, 2, 3)]
    assert reasons == [FailureReason.MISMATCH, FailureReason.ABORTED, FailureReason.ABORTED]
    capture.take_pass(batch((rid(3, 8), 5, 3)), *packed(5, 9))  # a chunk that was under way when the abort came
    capture.finished(rid(3, 8), aborted=True)
    assert capture.idle
    for entry in (root / rid(3, 8)).iterdir():
        entry.unlink()
    (root / rid(3, 8)).rmdir()
    capture.take_pass(batch((rid(3, 8), 8, 0)), *packed(8, 10))
    tensors(arrived(root, rid(3, 8)))


def test_a_promise_of_a_trillion_tokens_costs_no_memory(tmp_path: Path) -> None:
    capture = capture_into(tmp_path / "root")
    name = rid(1, 999_999_999_999)
    capture.take_pass(batch((name, 4, 0)), *packed(4, 0))
    capture.finished(name, aborted=False)
    assert failure(tmp_path / "root", name).reason is FailureReason.MISMATCH


def test_writers_that_hang_cost_one_bounded_wait_then_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_capture, "WAIT_S", 0.3)
    monkeypatch.setattr("hsjournal.capture.sglang_pieces.piece_plan", lambda *_: (4, 1 << 10))
    gate, write = threading.Event(), Assembly.write

    def hanging(self: Assembly, *args: Any) -> None:
        gate.wait(20)
        write(self, *args)

    monkeypatch.setattr(Assembly, "write", hanging)
    capture = capture_into(tmp_path / "root")
    took = []
    for row in range(3):
        before = time.monotonic()
        capture.take_pass(batch((rid(row, 100), 100, 0)), *packed(100, row))
        took.append(time.monotonic() - before)
    assert 0.25 < took[0] < 2.0
    assert max(took[1:]) < 0.15
    gate.set()
    for row in range(3):
        assert failure(tmp_path / "root", rid(row, 100)).reason is FailureReason.NO_ROOM
    capture.take_pass(batch((rid(9, 20), 20, 0)), *packed(20, 9))  # and it heals
    tensors(arrived(tmp_path / "root", rid(9, 20)))


def test_a_server_that_can_not_capture_publishes_one_error_a_request(tmp_path: Path) -> None:
    root = tmp_path / "root"
    capture = capture_into(root, speculative_algorithm="EAGLE")
    for _ in range(3):
        capture.take_pass(batch((rid(1, 8), 4, 0), ("other", 4, 0)), *packed(8, 0))
    refused = failure(root, rid(1, 8))
    assert refused.reason is FailureReason.UNSUPPORTED
    assert refused.detail == capture.about["refusal"]
    assert [p.name for p in root.iterdir()] == [rid(1, 8)]


def test_an_unforeseen_error_while_arranging_is_a_refusal_too(tmp_path: Path) -> None:
    settings = settings_from({"HSJOURNAL_HANDOVER_ROOT": str(tmp_path / "root")})
    assert settings is not None
    capture = Capture(settings, "0.5.23", {}, {}, SimpleNamespace())
    assert "AttributeError" in str(capture.refusal)


def test_a_process_that_is_not_the_writer_captures_nothing(tmp_path: Path) -> None:
    settings = settings_from({"HSJOURNAL_HANDOVER_ROOT": str(tmp_path / "root")})
    assert settings is not None
    capture = Capture(settings, "0.5.23", {}, {"attn_tp_rank": 1}, runner())
    assert capture.refusal is None
    capture.take_pass(batch((rid(1, 4), 4, 0)), *packed(4, 0))
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("parallel", "writes"),
    [
        ({}, True),
        ({"attn_tp_rank": 1}, False),
        ({"attn_cp_rank": 1}, False),
        ({"attn_tp_rank": 0, "tp_rank": 3}, True),  # DP attention: rank 3 of 4 holds requests of its own
        ({"pp_rank": 0, "pp_size": 2}, False),
        ({"pp_rank": 1, "pp_size": 2}, True),
    ],
)
def test_who_writes(parallel: dict[str, int], writes: bool) -> None:
    assert is_writer(parallel) is writes


@pytest.mark.parametrize(
    ("version", "args", "parallel", "words"),
    [
        ("0.5.16", {}, {}, "0.5.17 to 0.5.23"),
        ("0.5.24", {}, {}, "0.5.17 to 0.5.23"),
        ("0.6.0", {}, {}, "0.5.17 to 0.5.23"),
        ("garbage", {}, {}, "0.5.17 to 0.5.23"),
        ("0.5.23", {}, {"pp_size": 2}, "--pp-size 1"),
        ("0.5.23", {}, {"attn_cp_size": 2}, "context parallelism"),
        ("0.5.17", {"enable_prefill_context_parallel": True}, {}, "context parallelism"),
        ("0.5.23", {"disaggregation_mode": "prefill"}, {}, "disaggregation"),
        ("0.5.23", {"speculative_algorithm": "EAGLE3"}, {}, "--speculative-algorithm"),
        ("0.5.23", {"enable_two_batch_overlap": True}, {}, "--enable-two-batch-overlap"),
        ("0.5.23", {"enable_layernorm_sp": True}, {}, "--enable-layernorm-sp"),
        ("0.5.23", {"enable_return_aux_hidden_states": True}, {}, "--enable-return-aux-hidden-states"),
    ],
)
def test_what_is_refused_and_what_to_change(
    version: str, args: dict[str, Any], parallel: dict[str, int], words: str
) -> None:
    assert words in str(refusal_of(version, args, parallel))


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20", "0.5.23", "0.5.23.post1"])
def test_supported_versions_with_the_null_settings_pass(version: str) -> None:
    assert (
        refusal_of(
            version, {"disaggregation_mode": "null", "speculative_algorithm": None}, {"pp_size": 1, "attn_cp_size": 1}
        )
        is None
    )


def test_the_prenorm_state_is_refused_inside_a_graph_only() -> None:
    graphs = {"cuda_graph_config": {"prefill": {"backend": "breakable"}}}
    assert "--cuda-graph-backend-prefill disabled" in str(prenorm_refusal(graphs, "cuda"))
    assert prenorm_refusal(graphs, "cpu") is None
    assert prenorm_refusal({"cuda_graph_config": {"prefill": {"backend": "disabled"}}}, "cuda") is None


def test_settings_are_off_without_a_root_and_the_first_process_makes_the_boot_id() -> None:
    assert settings_from({}) is None
    environ = {
        "HSJOURNAL_HANDOVER_ROOT": "/dev/shm/x",
        "HSJOURNAL_CAPTURE_LAYERS": "1, 5,8",
        "HSJOURNAL_CAPTURE_PRENORM": "1",
    }
    launcher = settings_from(environ)
    assert launcher is not None
    assert (launcher.layers, launcher.prenorm, launcher.group_mode) == ((1, 5, 8), True, False)
    assert settings_from(environ) == launcher  # a child, which inherits the environment
    for bad in ({"HSJOURNAL_CAPTURE_LAYERS": "a"}, {"HSJOURNAL_HANDOVER_ROOT": "relative"}):
        found = settings_from(environ | bad)
        assert found is not None
        assert str(*bad) in str(found.problem)


def test_pieces_hold_a_pass_and_are_bounded() -> None:
    count, size = piece_plan(16384 * 7168 * 2 * 4, 7168 * 2)
    assert (count * size >= 16384 * 7168 * 2 * 4, size) == (True, 64 << 20)
    assert piece_plan(1, 1) == (4, 1 << 20)
    count, size = piece_plan(1 << 40, 1 << 20)
    assert count * size <= 2 << 30


def test_an_older_prefills_rows_never_land_after_the_newer_ones(tmp_path: Path) -> None:
    capture = capture_into(tmp_path / "root")
    assemblies, pieces = capture._assemblies, capture._pieces
    assert isinstance(assemblies, Assemblies)
    assert isinstance(pieces, Pieces)
    item = RowSlice(RequestId.sample("test0", 1, 1, 2), 0, 2, 0)
    assembly = assemblies.admit(item)
    assert assembly is not None
    old = assembly.expect_write()
    assert assemblies.admit(item) is assembly  # prefix 0 again: it was retracted
    new = assembly.expect_write()
    assert new > old
    rows = memoryview(bytes([1] * 2 * HIDDEN * 4))
    stale = memoryview(bytes([7] * 2 * HIDDEN * 4))
    for index in range(1, NUM_AUX + 1):
        assembly.write(assembly.expect_write(), index, 0, rows)
    assembly.write(new, 0, 0, rows)
    assembly.write(old, 0, 0, stale)  # its writer thread was slower
    assembly.write(assembly.expect_write(), -1, 0, memoryview(bytes(16)))
    assemblies.took(item)
    assert (arrived(tmp_path / "root", str(item.rid)) / "aux_0.bin").read_bytes() == bytes(rows)
