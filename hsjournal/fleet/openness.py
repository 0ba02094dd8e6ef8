"""Does a Ray cluster talk to whoever comes? Asked without a token, in a child, since Ray reads its mode once a process.

Who may talk to a cluster may run code on all its nodes, so one without authentication must not be reached from outside.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
from typing import Any

from hsjournal.errors import ServerError, UsageError
from hsjournal.watch.children import ChildError, StuckError, ask, module

DEADLINE = 60.0
WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": ""}


def refuse_open_cluster(address: str, *, trusted: bool) -> None:
    """Refuse a cluster without authentication one of whose nodes listens off loopback, unless it is trusted.

    Args:
        address: ``HOST:PORT`` of the head.
        trusted: whether the user says that the network is closed.

    Raises:
        UsageError: when it is open.
        ServerError: when there is no cluster.
    """
    try:
        command = ["env", *(f"{name}={value}" for name, value in WITHOUT_TOKEN.items()), *module(__name__, address)]
        found = ask(command, DEADLINE)
    except (ChildError, StuckError) as error:
        raise ServerError(
            f"no Ray cluster answers at {address} ({error.message})", remedy="Check --ray HOST:PORT."
        ) from None
    judge(found, trusted=trusted)


def judge(found: dict[str, Any], *, trusted: bool) -> None:
    """The rule itself: ``found`` has ``open`` and the nodes' ``addresses``.

    Raises:
        UsageError: when the cluster is refused.
    """
    outside = sorted({str(each) for each in found["addresses"] if not is_loopback(str(each))})
    if found["open"] and outside and not trusted:
        raise UsageError(
            f"the Ray cluster has no authentication, and its nodes ({', '.join(outside[:3])}) can be reached from outside: "
            "whoever reaches them may run code there",
            remedy="Start it with RAY_AUTH_MODE=token, or say --trust-cluster if its network is closed.",
        )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine seen from within; a name that can't be resolved is not."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host.strip("[]"), None)}
        return all(ipaddress.ip_address(address).is_loopback for address in found)
    except (OSError, ValueError):
        return False


def look(address: str) -> dict[str, Any]:
    """Ask the cluster who its nodes are, without a token."""
    from ray import _raylet
    from ray.exceptions import AuthenticationError, RpcError

    client: Any = _raylet  # compiled: it has no types
    try:
        nodes = client.GcsClient(address=address).get_all_node_info(timeout=30)
    except AuthenticationError:
        return {"open": False, "addresses": []}
    except RpcError as error:
        if "UNAUTHENTICATED" in str(error) or "Unauthenticated" in str(error):
            return {"open": False, "addresses": []}
        return {"error": str(error).splitlines()[0]}
    hosts = [node.node_manager_address for node in nodes.values()]
    return {"open": True, "addresses": [address.rsplit(":", 1)[0], *hosts]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(sys.argv[1])) + "\n")
