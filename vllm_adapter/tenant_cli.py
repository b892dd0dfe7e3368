"""``kvt tenant``: the name that quotas have for a tenant."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvtransport.errors import ConfigError
from kvtransport_vllm.router.identity import Keyring
from kvtransport_vllm.router.secret import SECRET_VARIABLE, known_secret
from kvtransport_vllm.tenants import label

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Print what quotas and status pages call a tenant.",
)


@app.command("salt")
def of_salt() -> None:
    """Of requests that carry this cache_salt, which is read from standard input."""
    try:
        typer.echo(label(_read("cache_salt").decode()))
    except UnicodeDecodeError as error:
        raise ConfigError(f"a cache_salt is UTF-8: {error}") from None


@app.command("client")
def of_client(
    secret_file: Annotated[
        str, typer.Option(help=f"The router's --secret-file; default: {SECRET_VARIABLE}, if set.")
    ] = "",
) -> None:
    """Of a client of kvt router: what --tenant finds, by default all of its Authorization header.

    It is read from standard input.
    """
    secret = known_secret(secret_file)
    if secret is None:
        raise ConfigError(f"the router's secret is needed: --secret-file FILE or {SECRET_VARIABLE}")
    keyring = Keyring(secret)
    typer.echo(label(keyring.salt(keyring.tenant(_read("client")), None)))


def _read(what: str) -> bytes:
    """One line, not shown while it is typed; never an argument, which others could see."""
    if sys.stdin.isatty():
        value: bytes = typer.prompt(what, hide_input=True).encode()
    else:
        value = sys.stdin.buffer.readline().rstrip(b"\r\n")
    if not value:
        raise ConfigError(f"no {what} on standard input")
    return value
