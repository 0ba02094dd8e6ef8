"""Do the stored final states give the log-probabilities that a server itself tells for the same prompts?

``python -m hsjournal.data.served RUN_DIR --rows 1,2,3 --server URL``: a child of ``hsjournal verify --logits N
--logits-server URL``, for models that don't fit beside it. The server computes the prompt, this side only the output
embeddings, which are read from the model's folder by rows. Aux layers are not looked at. The last line of standard output is
one JSON object.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hsjournal.config import KEY_VARIABLE
from hsjournal.data.finding import GAP_TOLERANCE, Fault, Found, alike, items_of, parser_of, tell
from hsjournal.data.head import Head
from hsjournal.data.hidden_states import HiddenStates
from hsjournal.errors import ServerError, UsageError

TIMEOUT_S = 600.0
_MOST_ANSWER = 1 << 28


class Server:
    """A server with SGLang's native endpoints.

    Args:
        url: ``http://HOST:PORT``; the API key comes from the environment.

    Raises:
        UsageError: when it is no such address.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"not the address of a server: {url!r}", remedy="Give it as http://HOST:PORT.")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            self._headers["Authorization"] = f"Bearer {key}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._told: dict[bytes, torch.Tensor] = {}

    def log_probabilities(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Of each token of the prompt but the first, ``[N - 1]``.

        Raises:
            ServerError: when the server can't be reached, or does not tell them.
        """
        key = input_ids.numpy().tobytes()
        if key not in self._told:
            self._told[key] = self._ask(input_ids.tolist())
        return self._told[key]

    def _ask(self, ids: list[int]) -> torch.Tensor:
        # Without a request id of ours, so that nothing is captured.
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(), self._headers)  # noqa: S310 - http only
        try:
            with self._open(request, timeout=TIMEOUT_S) as answer:
                told = json.loads(answer.read(_MOST_ANSWER))["meta_info"]["input_token_logprobs"]
            if [token for _, token, *_ in told] != ids:
                raise ValueError(f"those of {len(told)} other tokens")
            return torch.tensor([float(value) for value, *_ in told[1:]])
        except urllib.error.HTTPError as error:
            words = " ".join(error.read(2000).decode(errors="replace").split())[:300]
            raise self._mute(f"it answered {error.code}: {words}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"the server {self.url} can't be asked: {error}",
                remedy="Start it, or name another with --logits-server.",
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise self._mute(f"its answer holds none of this prompt ({type(error).__name__}: {error})") from None

    def _mute(self, why: str) -> ServerError:
        return ServerError(
            f"the server {self.url} does not tell the log-probabilities of a prompt: {why}",
            remedy="Name a stock SGLang server of the same model, or use --logits without --logits-server.",
        )


def examine(data: HiddenStates, rows: Sequence[int], folder: Path, *, server: Server) -> dict[str, Any]:
    """Hold the rows' final states against what the server says of their prompts.

    Returns:
        As :func:`hsjournal.data.logits.examine`, and ``server``.

    Raises:
        UsageError: when the folder's output embeddings can't be used, or the format holds no final state.
        ServerError: when the server can't be asked.
        DamageError: when a file is not as it was written.
    """
    head, m = Head(folder), data.manifest
    gaps: list[float] = []
    faults: list[Found] = []
    items = items_of(data, rows)
    for item in items:
        final = item["final"] if m.final_norm == "post" else head.norm(item["final"])
        if final is None:
            raise UsageError(
                f"the run's states are those before the last norm, and the norm of {folder} is no plain RMS norm",
                remedy="Use --logits without --logits-server.",
            )
        gap = _gap(head, server, final, item["input_ids"])
        gaps.append(gap)
        if gap > GAP_TOLERANCE[m.dtype]:
            kind, detail = _name(head, server, data, item, final, gap)
            faults.append(Found(item["row"], item["id"], "final", kind, detail))
    return {
        "checked": len(items),
        "mean_gap": sum(gaps) / len(gaps) if gaps else 0.0,
        "worst_gap": max(gaps, default=0.0),
        "faults": [asdict(fault) for fault in faults],
        "device": "cpu",
        "dtype": "float32",
        "server": server.url,
    }


def _gap(head: Head, server: Server, final: torch.Tensor, input_ids: torch.Tensor) -> float:
    """Nats a token, in the mean."""
    if len(input_ids) < 2:
        return 0.0
    rebuilt = head.log_probabilities(final, input_ids)
    return float((rebuilt - server.log_probabilities(input_ids)).abs().mean())


def _name(
    head: Head, server: Server, data: HiddenStates, item: dict[str, Any], final: torch.Tensor, gap: float
) -> tuple[str, str]:
    most, said = GAP_TOLERANCE[data.manifest.dtype], data.manifest.final_norm
    other = head.norm(item["final"]) if said == "post" else item["final"]
    if other is not None and _gap(head, server, other, item["input_ids"]) <= most:
        where = "before" if said == "post" else "after"
        return (
            Fault.WRONG_NORM,
            f"the state {where} the last norm, where the run says {said}-norm (off by {gap:.2f} nats a token)",
        )
    for prompt in alike(data, item):
        if _gap(head, server, final, prompt["input_ids"]) <= most:
            return Fault.SWAPPED_SAMPLE, f"it is that of row {prompt['row']} ({prompt['id']})"
    return Fault.UNLIKE, f"its log-probabilities are off by {gap:.2f} nats a token"


def main(arguments: Sequence[str]) -> int:
    """See the module; the exit code is 0 also when faults were found."""
    parser = parser_of("hsjournal.data.served")
    parser.add_argument("--server", required=True)
    options = parser.parse_args(arguments)
    return tell(options, lambda data, rows, folder: examine(data, rows, folder, server=Server(options.server)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
