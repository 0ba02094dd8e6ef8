"""Which servers a run works with: those that it attaches to, or one of our own, started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsjournal.config import LAUNCH, Endpoint, Manifest, RunPaths
from hsjournal.errors import ServerError, UsageError
from hsjournal.server.launch import fetch_json
from hsjournal.server.own import OwnServer
from hsjournal.server.recipe import SGLANG_START_TIMEOUT, EmbeddedOptions, Recipe, embedded, model_of, stock
from hsjournal.server.v1.launch import gateway
from hsjournal.sink.formats import refuse_wrong_norm
from hsjournal.sink.layouts import Layout

V1 = "v1+"
"""Before the address of a v1 server, where a run remembers how its server is reached."""
V1_STATE = "v1-open.json"
RING = "server-log"
"""Folder of the mirror with the log of a server of our own."""
_REACH_TIMEOUT = 10.0
_IT_IS_THERE = (401, 403, 404)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line says of servers; empty where it says nothing.

    Args:
        servers: addresses to attach to.
        launch: the command line of a server to start.
        start_timeout: seconds until it must answer.
        handover_roots: one for all servers, or one for each in their order.
        model: folder.
        layers: 0-based, comma-separated.
        dtype: of the embedded engine.
        prenorm: whether the final state before the model's last norm is wanted.
        port: of the embedded engine.
        protocol: ``v2``, or ``v1`` for a patched server of the older kind.
        reach: whether servers that run already are asked if they answer.
    """

    servers: tuple[str, ...] = ()
    launch: str = ""
    start_timeout: float = SGLANG_START_TIMEOUT
    handover_roots: tuple[Path, ...] = ()
    model: str = ""
    layers: str = ""
    dtype: str = ""
    prenorm: bool = False
    port: int = 0
    protocol: str = "v2"
    reach: bool = True


@dataclass(frozen=True, slots=True)
class Servers:
    """What was decided.

    Args:
        endpoints: every server; the address is empty for one of our own until it is started.
        own: the server to start; None when there are others to attach to.
        launch: the command line that it is started with, when it is not the embedded engine; with :data:`V1` before it
            the address of the v1 server behind a gateway.
        model: folder that the prompts are tokenised with.
    """

    endpoints: tuple[Endpoint, ...]
    own: OwnServer | None
    launch: str
    model: str

    @property
    def settings(self) -> dict[str, Any]:
        """As fields of :class:`~hsjournal.config.Settings`."""
        first, *more = self.endpoints
        return {"server_url": first.url, "handover_root": first.handover_root, "more_servers": tuple(more)}

    @property
    def request(self) -> dict[str, Any]:
        """As fields of the request to :mod:`hsjournal.prepare`."""
        first, *more = self.endpoints
        return {
            "model": self.model,
            "handover_root": first.handover_root,
            "attached_to": first.url,
            "more_servers": [[endpoint.url, endpoint.handover_root] for endpoint in more],
            "launched_with": self.launch,
        }


def for_new_run(paths: RunPaths, wish: Wish, layout: Layout) -> Servers:
    """The servers of a new run; those that run already are reached once.

    Raises:
        UsageError: naming the option and the remedy.
        ServerError: when one can't be reached.
    """
    _refuse_both(wish)
    if wish.protocol not in ("v1", "v2"):
        raise UsageError(f"there is no hand-over protocol {wish.protocol!r}", remedy="Give v2 (the default) or v1.")
    model = wish.model or (model_of(wish.launch) if wish.launch else "")
    if not wish.servers and not wish.launch and not model:
        raise UsageError(
            "neither a model nor a server is named",
            remedy="Use --model DIR for the embedded engine, or --server URL (with --model DIR for its tokenizer).",
        )
    if wish.protocol == "v1":
        return _v1_servers(paths, wish, layout, model)
    if wish.servers:
        _refuse_engine_options(wish, "--server names one that runs already", ("layers", "dtype", "prenorm", "port"))
        endpoints = _attached(wish.servers, wish.handover_roots, str(paths.default_handover_root), reach=wish.reach)
        return Servers(endpoints, None, "", model)
    root = _one_root(wish, str(paths.default_handover_root))
    prenorm = wish.prenorm or layout.final_norm == "pre"
    refuse_wrong_norm(layout, "pre" if prenorm else "post")
    own = _own(paths, wish, root, model, wish.layers, wish.dtype or "auto", prenorm=prenorm)
    return Servers((Endpoint("", root),), own, wish.launch, model)


def for_old_run(paths: RunPaths, wish: Wish, manifest: Manifest) -> Servers:
    """The servers of a run that goes on: what is said now, else what it was made with.

    Raises:
        UsageError, ServerError: as :func:`for_new_run`.
    """
    _refuse_both(wish)
    made_with = manifest.endpoints
    before = manifest.options.get(LAUNCH, "")
    if before.startswith(V1):
        root = _one_root(wish, made_with[0].handover_root)
        url = _one_v1(wish.servers or (before.removeprefix(V1),), reach=wish.reach)
        own = _gateway(paths, url, root, manifest.capture_layers, manifest.final_norm, wish.port)
        return Servers((Endpoint("", root),), own, V1 + url, manifest.model)
    launch = wish.launch or ("" if wish.servers else before)
    servers = wish.servers or (() if launch else tuple(endpoint.url for endpoint in made_with if endpoint.url))
    if servers:
        roots = wish.handover_roots
        if not roots:
            known = {endpoint.url: endpoint.handover_root for endpoint in made_with}
            roots = tuple(Path(known.get(url, made_with[0].handover_root)) for url in servers)
        return Servers(_attached(servers, roots, "", reach=wish.reach), None, "", manifest.model)
    root = _one_root(wish, made_with[0].handover_root)
    layers = ",".join(map(str, manifest.capture_layers))
    now = Wish(launch=launch, start_timeout=wish.start_timeout, port=wish.port)
    own = _own(paths, now, root, manifest.model, layers, manifest.dtype, prenorm=manifest.final_norm == "pre")
    return Servers((Endpoint("", root),), own, launch, manifest.model)


def layer_numbers(text: str) -> list[int]:
    """The layers in ``1,5,8``.

    Raises:
        UsageError: when it is no such list.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"not a list of layers: {text!r}", remedy="Give 0-based numbers, as --layers 1,5,8.") from None


def _own(paths: RunPaths, wish: Wish, root: str, model: str, layers: str, dtype: str, *, prenorm: bool) -> OwnServer:
    recipe: Recipe
    if wish.launch:
        _refuse_engine_options(wish, "--launch starts another", ("dtype", "port"))
        numbers = layer_numbers(layers) if layers else []
        recipe = stock(wish.launch, root, layers=numbers, prenorm=prenorm, start_timeout=wish.start_timeout)
    else:
        if not _is_model(Path(model)):
            raise UsageError(
                f"there is no model in {model} (no config.json)",
                remedy="Name a folder with config.json, tokenizer and safetensors, as save_pretrained leaves it.",
            )
        extra = ("--capture-prenorm",) if prenorm else ()
        recipe = embedded(EmbeddedOptions(str(Path(model).absolute()), root, layers, dtype, wish.port, extra))
    return OwnServer(recipe, paths.mirror / RING, paths.logs / "server.log")


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except OSError as error:  # a parent that may not be looked into
        raise UsageError(
            f"the model folder {folder} can't be read: {error.strerror}", remedy="Mend its permissions (--model)."
        ) from None


def _v1_servers(paths: RunPaths, wish: Wish, layout: Layout, model: str) -> Servers:
    """A patched server of the older kind: a gateway of ours stands before it."""
    if not wish.layers:
        raise UsageError(
            "the dumps of a v1 server do not say which layers they hold",
            remedy="Name them, 0-based, as --layers 1,5,8 (and --capture-prenorm if its final state is pre-norm).",
        )
    _refuse_engine_options(wish, "--protocol v1 names a server that runs already", ("dtype",))
    url, root = _one_v1(wish.servers, reach=wish.reach), _one_root(wish, str(paths.default_handover_root))
    final_norm = "pre" if wish.prenorm else "post"
    refuse_wrong_norm(layout, final_norm)
    own = _gateway(paths, url, root, tuple(layer_numbers(wish.layers)), final_norm, wish.port)
    return Servers((Endpoint("", root),), own, V1 + url, model)


def _one_v1(servers: Sequence[str], *, reach: bool) -> str:
    if len(servers) != 1:
        raise UsageError(
            f"--protocol v1 stands before one server, and {len(servers)} are named",
            remedy="Name it with --server http://HOST:PORT, and its folder of req_N with --handover-root.",
        )
    _check_address(servers[0])
    if reach:
        _reach(servers)
    return servers[0].rstrip("/")


def _gateway(paths: RunPaths, url: str, root: str, layers: Sequence[int], final_norm: str, port: int) -> OwnServer:
    recipe = gateway(url, root, layers, final_norm, paths.mirror / V1_STATE, port)
    return OwnServer(recipe, paths.mirror / RING, paths.logs / "server.log")


def _refuse_both(wish: Wish) -> None:
    if wish.servers and wish.launch:
        raise UsageError(
            "--server attaches to a server that runs, and --launch starts one of our own",
            remedy="Leave one of them out.",
        )


def _refuse_engine_options(wish: Wish, why: str, names: Sequence[str]) -> None:
    flags = {"layers": "--layers", "dtype": "--dtype", "prenorm": "--capture-prenorm", "port": "--port"}
    said = [flags[name] for name in names if getattr(wish, name)]
    if said:
        raise UsageError(
            f"{', '.join(said)} set up the embedded engine, and {why}",
            remedy="Leave them out here, and say it in that server's own command line.",
        )


def _one_root(wish: Wish, default: str) -> str:
    if len(wish.handover_roots) > 1:
        raise UsageError("there is one server, and several --handover-root", remedy="Name one.")
    return str(wish.handover_roots[0].absolute()) if wish.handover_roots else default


def _attached(servers: Sequence[str], roots: Sequence[Path], default: str, *, reach: bool) -> tuple[Endpoint, ...]:
    places = [str(root.absolute()) for root in roots] or [default]
    if len(places) not in (1, len(servers)):
        raise UsageError(
            f"{len(servers)} servers and {len(places)} hand-over roots",
            remedy="Give --handover-root once for all servers, or once for each, in the order of --server.",
        )
    if len(places) == 1:
        places *= len(servers)
    for url in servers:
        _check_address(url)
    doubled = {url for url in servers if [other.rstrip("/") for other in servers].count(url.rstrip("/")) > 1}
    if doubled:
        raise UsageError(f"{min(doubled)} is named twice", remedy="Name each server once (--server).")
    if reach:
        _reach(servers)
    return tuple(Endpoint(url.rstrip("/"), root) for url, root in zip(servers, places, strict=True))


def _check_address(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"not the address of a server: {url!r}", remedy="Give it as http://HOST:PORT (--server).")
    if "@" in url:
        raise UsageError(
            "a name or password in the server's address would stand in lists of processes, and in the journal",
            remedy="Give the key with --api-key-file.",
        )


def _reach(servers: Sequence[str]) -> None:
    """One of them must answer; the others may come later."""
    problems = []
    for url in servers:
        try:
            fetch_json(url.rstrip("/") + "/server_info", _REACH_TIMEOUT)
        except (OSError, ValueError) as error:
            if getattr(error, "code", None) in _IT_IS_THERE:
                return  # the preflight says more
            problems.append(f"the server at {url} can't be reached: {getattr(error, 'reason', error)}")
        else:
            return
    raise ServerError("; ".join(problems), remedy="Start it, or check the address (--server).")
