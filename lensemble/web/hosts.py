"""Whether a request names this machine: a page elsewhere could have its own name lead here."""

import ipaddress


def names_this_machine(host: str) -> bool:
    """Of a ``Host`` header: localhost or an address of loopback, with or without a port."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
