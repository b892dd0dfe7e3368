"""``kvt router``: the options and their checks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtransport.errors import KVTransportError
from kvtransport_vllm.router import config as cfg
from kvtransport_vllm.router.secret import SECRET_VARIABLE, load_secret

app = typer.Typer(add_completion=False, no_args_is_help=False)

_Prefill = Annotated[
    list[str],
    typer.Option(help="Prefill engine, [NAME=]URL; repeat for several.", show_default=False),
]
_Decode = Annotated[
    list[str],
    typer.Option(
        help="Decode engine, [NAME=]URL; NAME is its peer name in the prefill engines' "
        "configuration; repeat for several.",
        show_default=False,
    ),
]
_Host = Annotated[str, typer.Option(help="Address to listen on.")]
_Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
_Affinity = Annotated[str, typer.Option(help="Where the conversation comes from, in order.")]
_Tenant = Annotated[str, typer.Option(help="Where the tenant comes from, in order; or none.")]
_TenantSalt = Annotated[
    bool, typer.Option(help="Keep tenants' KV apart by a cache_salt for each tenant.")
]
_SecretFile = Annotated[
    str,
    typer.Option(
        help=f"File with the secret behind ids and salts; else ${SECRET_VARIABLE}, else a "
        "random one. All replicas need the same.",
        show_default=False,
    ),
]
_AffinityTtl = Annotated[
    float, typer.Option(help="Seconds for which an idle conversation is remembered.")
]
_BlocksTtl = Annotated[
    float, typer.Option(help="The decode engines' setting of that name, in seconds.")
]
_Entries = Annotated[int, typer.Option(help="Most bindings kept in memory.")]
_Skew = Annotated[
    int, typer.Option(help="Requests by which a guessed engine may be busier than the idlest.")
]
_OnFailure = Annotated[
    str,
    typer.Option(help="decode: the decode engine computes the prompt; error: answer 502 or 503."),
]
_Override = Annotated[
    bool, typer.Option(help="Let clients turn KV reuse off with x-kvt-reuse: off.")
]
_Forward = Annotated[
    list[str] | None,
    typer.Option(help="Further client header that engines get; repeat.", show_default=False),
]
_RedisUrl = Annotated[
    str,
    typer.Option(help="Redis that several replicas share, redis://HOST:PORT.", show_default=False),
]
_RedisTimeout = Annotated[float, typer.Option(help="Seconds to wait for it, then it is a miss.")]
_Limit = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=NUMBER, repeat; names: " + ", ".join(cfg.limit_names()), show_default=False
    ),
]
_LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


@app.callback(invoke_without_command=True)
def router(
    prefill: _Prefill,
    decode: _Decode,
    host: _Host = "127.0.0.1",
    port: _Port = 9000,
    affinity: _Affinity = cfg.DEFAULT_AFFINITY,
    tenant: _Tenant = cfg.DEFAULT_TENANT,
    tenant_salt: _TenantSalt = True,
    secret_file: _SecretFile = "",
    affinity_ttl: _AffinityTtl = 960.0,
    decoder_kv_blocks_ttl: _BlocksTtl = 480.0,
    affinity_entries: _Entries = 200_000,
    max_skew: _Skew = 4,
    on_prefill_failure: _OnFailure = "decode",
    allow_reuse_override: _Override = False,
    forward_header: _Forward = None,
    redis_url: _RedisUrl = "",
    redis_timeout: _RedisTimeout = 0.025,
    limit: _Limit = None,
    log_level: _LogLevel = "info",
) -> None:
    """Route conversations to prefill and decode engines, OpenAI-compatible.

    Every conversation keeps its decode engine, so that the prefill engine can
    pull the KV of earlier turns back from it.
    """
    try:
        config = cfg.RouterConfig(
            prefills=cfg.parse_engines(prefill, "prefill"),
            decodes=cfg.parse_engines(decode, "decode"),
            affinity=cfg.parse_sources(affinity, "--affinity", content=True),
            tenant=cfg.parse_sources(tenant, "--tenant", content=False),
            secret=load_secret(secret_file, shared=bool(redis_url)),
            tenant_salt=tenant_salt,
            affinity_ttl_s=cfg.check_ttl(affinity_ttl, decoder_kv_blocks_ttl),
            affinity_entries=affinity_entries,
            max_skew=max_skew,
            on_prefill_failure=cfg.parse_on_failure(on_prefill_failure),
            allow_reuse_override=allow_reuse_override,
            forward_headers=cfg.parse_headers(forward_header or ()),
            redis_url=redis_url,
            redis_timeout_s=redis_timeout,
            limits=cfg.parse_limits(limit or ()),
        )
        from kvtransport_vllm.router.server import serve

        serve(config, host=host, port=port, log_level=log_level)
    except KVTransportError as error:
        typer.echo(f"kvt router: {error}", err=True)
        raise typer.Exit(2) from error
