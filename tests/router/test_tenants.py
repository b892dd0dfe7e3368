"""Tenants never meet: neither in affinity nor in KV."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtransport_vllm import tenants

A = {"Authorization": "Bearer a"}
B = {"Authorization": "Bearer b"}
SECRET = {"KVT_ROUTER_SECRET": "0123456789abcdef-for-tests"}


def salts(engine):
    return [body.get("cache_salt") for body in engine.bodies]


def test_two_users_with_one_conversation_id_never_meet(start):
    router = start.cluster(1, 2)
    conversation = {"X-Conversation-ID": "shared"}
    homes = {"a": set(), "b": set()}
    for _ in range(3):
        homes["a"].add(router.chat("x", {**A, **conversation}).headers["x-kvt-decode"])
        homes["b"].add(router.chat("y", {**B, **conversation}).headers["x-kvt-decode"])
    assert homes["a"] != homes["b"]
    assert {len(home) for home in homes.values()} == {1}
    assert router.metric("kvt_router_affinity_total", result="miss") == 2
    hints = [body["kv_transfer_params"].get("kvt_ask") for body in router.prefills[0].bodies]
    assert hints[:2] == [None, None]


def test_two_users_with_one_text_never_meet(start):
    router = start.cluster(1, 2)
    messages = [
        {"role": "user", "content": "same"},
        {"role": "assistant", "content": "same"},
        {"role": "user", "content": "same again"},
    ]
    for headers in (A, B):
        router.post("/v1/chat/completions", {"model": "m", "messages": messages}, headers)
    assert router.metric("kvt_router_affinity_total", result="miss") == 2


def test_each_tenant_has_a_salt_on_both_legs(start):
    router = start.cluster(1, 1)
    for headers in (A, B, A, {}):
        assert router.chat(headers=headers).status == 200
    for engine in (*router.prefills, *router.decodes):
        a, b, again, anonymous = salts(engine)
        assert a == again != b
        assert anonymous is None
        assert len(a) == 32
        assert set(a) <= set("0123456789abcdef")
    assert salts(router.prefills[0]) == salts(router.decodes[0])


def test_a_clients_own_salt_narrows_but_never_crosses(start):
    router = start.cluster(1, 1)
    router.chat(headers=A)
    (salt_of_a,) = salts(router.prefills[0])
    for headers in (A, B, {}):
        assert router.chat(headers=headers, cache_salt="mine").status == 200
        # The salt of tenant A itself is of no use either.
        assert router.chat(headers=headers, cache_salt=salt_of_a).status == 200
    used = salts(router.prefills[0])
    assert len(set(used)) == len(used) == 7
    assert not {"mine"} & set(used)


def test_a_client_is_one_tenant_for_engines_whatever_its_salts(start):
    router = start.router([start.engine("p")], [start.engine("d")], env=SECRET)
    for headers, own in ((A, {}), (A, {"cache_salt": "1"}), (A, {"cache_salt": "2.3"}), (B, {})):
        router.chat(headers=headers, **own)
    for own in ("1", "2"):
        router.chat(cache_salt=own)
    one, again, still, other, nobody, neither = map(tenants.label, salts(router.decodes[0]))
    assert one == again == still
    assert nobody == neither == "", "as without any salt"
    assert len({one, other, ""}) == 3
    assert named_by("client", "Bearer a", env=SECRET).stdout.split() == [one]


def test_the_command_means_the_bytes_that_the_router_gets(start):
    router = start.router(
        [start.engine("p")],
        [start.engine("d")],
        "--tenant",
        "header:X-Tenant,body:user",
        env=SECRET,
    )
    name = "M\u00fcller"
    router.chat(headers={"X-Tenant": name.encode().decode("latin-1")})
    router.chat(user=name)
    expected = named_by("client", name, env=SECRET).stdout.split()
    assert [tenants.label(salt) for salt in salts(router.decodes[0])] == expected * 2


def named_by(command, value, env=None):
    return subprocess.run(
        [sys.executable, "-c", "from kvtransport.cli import main; main()", "tenant", command],
        input=value + "\n",
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_the_command_names_tenants():
    assert named_by("salt", "acme").stdout.split() == [tenants.label("acme")]
    refused = named_by("client", "Bearer a", env={"KVT_ROUTER_SECRET": ""})
    assert refused.returncode == 1
    assert "KVT_ROUTER_SECRET" in refused.stderr
    assert "no cache_salt" in named_by("salt", "").stderr
    short = named_by("client", "Bearer a", env={"KVT_ROUTER_SECRET": "short"})
    assert "at least 16" in short.stderr


@pytest.mark.parametrize("salt", ["", 5, ["x"], "x" * 1025, {"a": "b"}])
def test_a_malformed_salt_is_refused(cluster, salt):
    reply = cluster.chat(cache_salt=salt)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "cache_salt"


def test_the_secret_decides_the_salt(start):
    engines = [start.engine("p"), start.engine("d")]
    for env in (SECRET, SECRET, {"KVT_ROUTER_SECRET": "another secret of length"}, {}):
        start.router(engines[:1], engines[1:], env=env).chat(headers=A)
    one, same, other, chance = salts(engines[0])
    assert one == same
    assert len({one, other, chance}) == 3


def test_salting_can_be_turned_off(start):
    router = start.cluster(1, 1, "--no-tenant-salt")
    router.chat(headers=A)
    router.chat(headers=A, cache_salt="verbatim")
    assert salts(router.decodes[0]) == [None, "verbatim"]


def test_tenants_can_come_from_another_place(start):
    router = start.cluster(1, 1, "--tenant", "header:X-Tenant,body:user")
    router.chat(headers={"X-Tenant": "t", **A})
    router.chat(headers={"X-Tenant": "t", **B})
    router.chat(user="u")
    router.chat(headers=A)
    one, two, three, four = salts(router.decodes[0])
    assert one == two is not None
    assert three not in {None, one}
    assert four is None
    reply = router.chat(user=["u"])
    assert (reply.status, reply.json()["error"]["param"]) == (400, "user")
