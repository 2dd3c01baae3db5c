"""Addresses as people write them: an IP address and a port, IPv6 in brackets."""

import ipaddress


def split_address(text: str) -> tuple[str, int]:
    """``"127.0.0.1:7707"`` or ``"[::1]:7707"`` as host and port.

    Raises:
        ValueError: not an IP address literal and a port.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f'{text!r} is not host:port, such as "127.0.0.1:7707" or "[::1]:7707"')
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
    except ValueError as error:
        raise ValueError(f"{host!r} in {text!r} is not an IP address") from error
    if (address.version == 6) != (bare != host):
        raise ValueError(f"{text!r}: an IPv6 address, and only that, stands in brackets")
    return str(address), int(port)


def family(text: str) -> int:
    """4 or 6.

    Raises:
        ValueError: as ``split_address``.
    """
    return ipaddress.ip_address(split_address(text)[0]).version


def is_loopback(text: str) -> bool:
    """Whether the address reaches this machine only.

    Raises:
        ValueError: as ``split_address``.
    """
    return ipaddress.ip_address(split_address(text)[0]).is_loopback
