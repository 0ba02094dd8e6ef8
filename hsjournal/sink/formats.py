"""The formats there are. A new one is a new entry of ``LAYOUTS``; where the rules come from stands beside each."""

from __future__ import annotations

from hsjournal.errors import UsageError
from hsjournal.sink.layouts import Container, Content, Key, Layout

_IDS, _MASK = Key("input_ids", Content.IDS, ("N",)), Key("loss_mask", Content.MASK, ("N",))
_SAID = Key("hsjournal", Content.PROVENANCE)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(  # SpecForge 0.2.0: specforge/algorithms/eagle3/data.py
            name="specforge",
            path="rows_{start}-{end}/data_{row}.ckpt",
            group=2000,
            container=Container.TORCH,
            final_norm="post",
            keys=(
                _IDS,
                _MASK,
                Key("hidden_state", Content.FINAL, (1, "N", "H")),
                Key("aux_hidden_state", Content.AUX, (1, "N", "kH")),
                _SAID,
            ),
        ),
        Layout(  # SpecForge 0.2.0: specforge/algorithms/common/dflash_family_data.py
            name="specforge-dflash",
            path="rows_{start}-{end}/data_{row}.ckpt",
            group=2000,
            container=Container.TORCH,
            final_norm=None,
            keys=(_IDS, _MASK, Key("hidden_states", Content.AUX, (1, "N", "kH")), _SAID),
            drops_final=True,
        ),
        Layout(  # the same
            name="specforge-dspark",
            path="rows_{start}-{end}/data_{row}.ckpt",
            group=2000,
            container=Container.TORCH,
            final_norm="post",
            keys=(
                _IDS,
                _MASK,
                Key("target_last_hidden_states", Content.FINAL, (1, "N", "H")),
                Key("hidden_states", Content.AUX, (1, "N", "kH")),
                _SAID,
            ),
        ),
        Layout(  # speculators 0.9.0: ArrowDataset of speculators/train/data.py; hs-connectors: hs_connectors/transfer.py
            name="speculators",
            path="hidden_states/hs_{row}.safetensors",
            group=1 << 62,
            container=Container.SAFETENSORS,
            final_norm="pre",
            keys=(
                Key("token_ids", Content.IDS, ("N",)),
                Key("hidden_states", Content.ALL, ("N", "k+1", "H")),
                _SAID,
                Key("final_norm", Content.NORM),
                Key("capture_layers", Content.LAYERS),
            ),
        ),
        Layout(  # nvidia-modelopt 0.47.0: OfflineSupervisedDataset of modelopt/torch/speculative/eagle/utils.py
            name="modelopt",
            path="{id}.pt",
            group=1 << 62,
            container=Container.TORCH,
            final_norm=None,
            keys=(
                _IDS,
                _MASK,
                Key("hidden_states", Content.FINAL, ("N", "H")),
                Key("aux_hidden_states", Content.AUX, ("N", "kH")),
                Key("hidden_states_prenorm", Content.IS_PRENORM),
                Key("conversation_id", Content.SAMPLE_ID),
                _SAID,
            ),
        ),
        Layout(  # by reading the project's code: the package of this name on PyPI (0.0.1) is empty
            name="torchspec",
            path="samples/{sha1}.pt",
            group=1 << 62,
            container=Container.TORCH,
            final_norm=None,
            keys=(
                Key("input_ids", Content.IDS, (1, "N")),
                Key("packed_loss_mask", Content.MASK_RUNS),
                Key("last_hidden_states", Content.FINAL, (1, "N", "H")),
                Key("hidden_states", Content.AUX, (1, "N", "kH")),
                Key("data_id", Content.SAMPLE_ID),
                Key("metadata", Content.PROVENANCE),
            ),
        ),
        Layout(  # angelslim 0.5.0: OfflineEagle3Dataset of train/data/dataset_builder/offline_dataset_builder.py
            name="angelslim",
            path="rows_{start}-{end}/data_{row}.ckpt",
            group=5000,
            container=Container.TORCH,
            final_norm="post",
            keys=(
                Key("input_ids", Content.IDS, (1, "N")),
                Key("loss_mask", Content.MASK, (1, "N")),
                Key("target_hiddens", Content.FINAL, (1, "N", "H")),
                Key("hidden_states", Content.AUX, (1, "N", "kH")),
                _SAID,
            ),
        ),
        Layout(  # ours, for whoever brings a loader of their own
            name="safetensors",
            path="rows_{start}-{end}/row_{row}.safetensors",
            group=2000,
            container=Container.SAFETENSORS,
            final_norm=None,
            keys=(
                _IDS,
                _MASK,
                Key("aux_hidden_states", Content.AUX, ("N", "k", "H")),
                Key("last_hidden_states", Content.FINAL, ("N", "H")),
                _SAID,
                Key("final_norm", Content.NORM),
                Key("capture_layers", Content.LAYERS),
            ),
        ),
    )
}


def layout_named(name: str) -> Layout:
    """The format ``name``.

    Raises:
        UsageError: naming those there are.
    """
    try:
        return LAYOUTS[name]
    except KeyError:
        raise UsageError(
            f"there is no output format {name!r}", remedy=f"Use one of: {', '.join(LAYOUTS)} (--format)."
        ) from None


def refuse_wrong_norm(layout: Layout, final_norm: str) -> None:
    """Refuse to write a final state of the other kind than the trainer reads.

    Args:
        layout: the format.
        final_norm: of the server's dumps.

    Raises:
        UsageError: with what to do.
    """
    if layout.final_norm in (None, final_norm):
        return
    both = ", ".join(name for name, other in LAYOUTS.items() if other.final_norm in (None, final_norm))
    how = (
        "Start the server so that it captures the state before the last norm (embedded engine: --capture-prenorm; "
        "SGLang: HSJOURNAL_CAPTURE_PRENORM=1)"
        if layout.final_norm == "pre"
        else "Start the server without --capture-prenorm (SGLang: without HSJOURNAL_CAPTURE_PRENORM)"
    )
    raise UsageError(
        f"format {layout.name} holds the final state {_NORM[str(layout.final_norm)]} the model's last norm, "
        f"and the server gives the one {_NORM[final_norm]} it",
        remedy=f"{how}, or use one of the formats {both} (--format).",
    )


_NORM = {"post": "after", "pre": "before"}
